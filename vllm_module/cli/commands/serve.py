"""``vllm-module serve``: answer requests over HTTP."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import typer

from vllm_module.base.messages import printable
from vllm_module.cli.choices import CacheDType
from vllm_module.cli.hosts import START, HostOptions
from vllm_module.cli.options import (
    CacheDTypeOption,
    DeviceOptions,
    EngineRankOptions,
    LengthOption,
    ModelOptions,
    PrecisionOptions,
    Source,
    torch_device,
)
from vllm_module.cli.output import CommandError, announce, console, working
from vllm_module.cli.ranks import is_first_rank, under_torchrun
from vllm_module.cli.server_options import ServedAdapterOptions, ServerOptions, StepOptions
from vllm_module.cli.serving import serving
from vllm_module.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm_module.server.connection import Limits
    from vllm_module.server.endpoint import Keys
    from vllm_module.server.listener import Listener
    from vllm_module.server.state import State

# In the environment of one of several engines: the Unix socket that its server listens on.
BACKEND = "VLLM_MODULE_BACKEND"
# If the engines share experts: the engine's number, and the port at which they meet.
ENGINE = "VLLM_MODULE_ENGINE"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    context: typer.Context,
    source: Source,
    *,
    server: ServerOptions,
    adapters: ServedAdapterOptions,
    steps: StepOptions,
    ranks: EngineRankOptions,
    hosts: HostOptions,
    precision: PrecisionOptions,
    model: ModelOptions,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    max_model_len: LengthOption = None,
    devices: DeviceOptions,
) -> None:
    """Answer requests over HTTP.

    The protocols are OpenAI's and Anthropic's. The paths are /v1/completions, /v1/chat/completions,
    /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/embeddings, /v1/models, /tokenize,
    /detokenize, /health, /ready, /version, /metrics, /summary, /weight_version, /is_sleeping,
    /get_world_size and /server_info; for operators /pause, /resume, /sleep, /wake_up,
    /update_weights, /reset_prefix_cache, /v1/load_lora_adapter, /v1/unload_lora_adapter and /abort;
    for browsers a page at /. While the model is loading, /health answers 503. Sampling parameters
    that a request leaves out are those of generation_config.json, else the protocol's.
    With --tp, each rank is a process; under torchrun, rank 0 answers. With --nnodes, start
    the command on each host: host 0 answers.
    """
    folders = adapters.folders(server.served_model_name or [source])
    if server.weights_port is not None and not server.admin_key:
        raise typer.BadParameter("it needs an --admin-key", param_hint="--weights-port")
    if (path := os.environ.get(BACKEND)) is not None:
        # The front refuses connections; one that it has closed may count here for a moment more.
        most = 2 * server.max_connections
        server = replace(
            server, uds=Path(path), ssl_certfile=None, ssl_keyfile=None, max_connections=most
        )
    elif server.data_parallel_size > 1:
        if hosts.nnodes > 1:
            raise typer.BadParameter(
                "several engines are on one host: leave it out, or --data-parallel-size",
                param_hint="--nnodes",
            )
        of_engines = _devices(ranks, devices, server.data_parallel_size)
        if ranks.enable_expert_parallel:
            port = _meeting_port()
            for number, environment in enumerate(of_engines):
                environment[ENGINE] = f"{number} {port}"
        _serve_by_several(source, server, context.find_root().obj, of_engines)
        return
    hosts.start(context.find_root().obj, ranks, devices.timeout, ranks.pp)
    shared: dict[str, Any] = {}
    if path is not None and (shares := os.environ.get(ENGINE)) is not None:
        number, port = map(int, shares.split())
        shared = {"data_parallel_size": server.data_parallel_size, "data_parallel_rank": number}
        shared["data_parallel_rpc_port"] = port
    with ExitStack() as stack:
        if is_first_rank():
            listener, state = stack.enter_context(_listening(source, server))
            if path is None and not console(stderr=True).is_terminal:  # which shows the progress
                announce(f"loading {printable(source)}, listening at {listener.url}")
        loading = serving(
            source,
            ranks,
            precision,
            model,
            devices,
            encoders=True,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype.value,
            max_loras=adapters.max_loras,
            max_cpu_loras=adapters.max_cpu_loras,
            **steps.entries(),
            **shared,
        )
        llm = stack.enter_context(loading)  # returns on the first rank only
        for name, folder in folders.items():
            with working(f"loading the adapter {printable(name)}"):
                llm.load_adapter(name, folder)
        if server.weights_port is not None and server.admin_key:
            try:
                weights = llm.serve_weights(
                    server.host, server.weights_port, token=server.admin_key[0]
                )
            except (OSError, ValueError, UnsupportedModelError) as error:
                raise CommandError(f"--weights-port: {error}") from error
            stack.enter_context(weights)
            announce(f"its weights are at {weights.url}")
        from vllm_module.runtime.async_llm import AsyncLLM
        from vllm_module.server.tools import Formats

        engine = AsyncLLM(llm, max_waiting=server.max_waiting)
        stack.callback(engine.close)
        gc.collect()
        gc.freeze()  # what is loaded is no garbage, and no pass has to visit it
        stack.callback(gc.unfreeze)
        stack.enter_context(_stopping(listener.stop))
        state.formats = Formats.of(
            llm.get_chat_template(),
            server.tool_call_parser,
            server.reasoning_parser,
            llm.get_chat_template(tools=True),
        )
        state.loaded, state.llm = int(time.time()), engine
        if path is None:
            announce(f"serving {printable(source)} at {listener.url}")
        listener.join()


def _meeting_port() -> int:
    """Return a free port at which engines can meet once they are loaded.

    It is below the system's own range, from which any connection could have it until then, also
    one of an engine to this port.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _devices(
    ranks: EngineRankOptions, devices: DeviceOptions, engines: int
) -> list[dict[str, str]]:
    """Return what the environment of each engine says of its devices: nothing, on a CPU."""
    if devices.device == "cpu" or torch_device(devices.device).type == "cpu":
        return [{} for _ in range(engines)]
    if ":" in devices.device:
        raise typer.BadParameter(
            f"it is one device, and {engines} engines need their own: give cuda",
            param_hint="--device",
        )
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(map(str, range(torch.cuda.device_count())))
    names, each = [name for name in visible.split(",") if name], (ranks.tp or 1) * ranks.pp
    if len(names) < engines * each:
        raise typer.BadParameter(
            f"{engines} engines of {each} ranks need {engines * each} devices, and there are "
            f"{len(names)}",
            param_hint="--data-parallel-size",
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + each])}
        for first in range(0, engines * each, each)
    ]


def _serve_by_several(
    source: str,
    options: ServerOptions,
    arguments: Sequence[str],
    environments: Sequence[dict[str, str]],
) -> None:
    """Start a server of the same command for each engine, and pass requests on to them."""
    if under_torchrun():
        raise typer.BadParameter(
            "each engine starts its own ranks: start the command without torchrun",
            param_hint="--data-parallel-size",
        )
    if options.weights_port is not None:
        raise typer.BadParameter(
            "it is the port of one engine: leave it out, or --data-parallel-size",
            param_hint="--weights-port",
        )
    from vllm_module.server.backends import Backends
    from vllm_module.server.front import Front, front_application

    state = Front()
    with ExitStack() as stack:
        app = partial(front_application, state)
        listener = stack.enter_context(_listening_with(app, options, files=2))
        stopped = Event()
        engines = f"{printable(source)} by {options.data_parallel_size} engines"
        loading = working(f"loading {engines}, listening at {listener.url}", lines=True)
        with _stopping(stopped.set), loading:
            backends = Backends([sys.executable, "-c", START, *arguments], BACKEND, environments)
            stack.callback(backends.close)
            failed = backends.until_ready(stopped)
        if stopped.is_set():
            return
        if failed is not None:
            raise CommandError(f"{failed} before it had loaded: see what it printed")
        stack.enter_context(_stopping(listener.stop))
        state.backends = backends
        announce(f"serving {engines} at {listener.url}")
        listener.join()


@contextmanager
def _listening(source: str, options: ServerOptions) -> Iterator[tuple[Listener, State]]:
    """Answer requests in a thread until the end of the block."""
    from vllm_module.server.app import application
    from vllm_module.server.state import State

    state = State(options.served_model_name or [source], options.max_prompts)
    with _listening_with(partial(application, state), options) as listener:
        yield listener, state


@contextmanager
def _listening_with(
    application: Callable[[Keys, Limits], Any], options: ServerOptions, files: int = 1
) -> Iterator[Listener]:
    from vllm_module.server.app import opened_to
    from vllm_module.server.connection import Limits
    from vllm_module.server.endpoint import Keys
    from vllm_module.server.listener import Address, Listener
    from vllm_module.server.tool_formats import FORMATS

    if options.tool_call_parser not in ("auto", "none", *FORMATS):
        raise typer.BadParameter(
            f"{options.tool_call_parser!r} is none of auto, none, {', '.join(FORMATS)}",
            param_hint="--tool-call-parser",
        )
    if options.reasoning_parser not in ("auto", "none"):
        raise typer.BadParameter("it is auto or none", param_hint="--reasoning-parser")
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise typer.BadParameter("TLS needs both files", param_hint="--ssl-certfile, --ssl-keyfile")
    address = Address(
        options.host, options.port, options.uds, options.ssl_certfile, options.ssl_keyfile
    )
    try:
        keys = Keys(options.api_key or (), options.admin_key or ())
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint="--api-key, --admin-key") from None
    limits = Limits(options.max_body_mib << 20, options.max_connections)
    app = application(keys, limits)
    if options.allowed_origins:
        app = opened_to(app, options.allowed_origins)
    try:
        listener = Listener(app, address, limits, options.stop_seconds, files)
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        raise CommandError(
            f"cannot listen on {printable(str(where))}: {error.strerror or error}"
        ) from error
    if not options.api_key and options.uds is None and options.host not in _LOOPBACK:
        announce(f"no --api-key: whoever reaches {listener.url} may use the model")
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()
        listener.stop()
        listener.join()


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at SIGTERM and Ctrl-C, which otherwise end the process."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

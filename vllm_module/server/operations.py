"""What operators and trainers ask of a server: health, metrics, weights."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from vllm_module.base.version import __version__
from vllm_module.runtime.llm import LLM
from vllm_module.server.errors import ApiError
from vllm_module.server.metrics import prometheus_text
from vllm_module.server.protocol import Body
from vllm_module.server.state import State
from vllm_module.weights.update_file import open_update


def _level(given: Any) -> Any:
    """Return the level that a text names; anything else as it is."""
    return {"1": 1, "2": 2}.get(given, given) if isinstance(given, str) else given


class PauseBody(Body):
    """The body of /pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class SleepBody(Body):
    """The body of /sleep; in a query, the level is a text."""

    level: Annotated[Literal[1, 2], BeforeValidator(_level)] = 1
    mode: Literal["abort", "wait"] = "abort"


class WakeBody(Body):
    """The body of /wake_up; in a query, one tag is a text."""

    tags: Annotated[
        list[Literal["weights", "kv_cache"]] | None,
        BeforeValidator(lambda tags: [tags] if isinstance(tags, str) else tags),
    ] = None


class UpdateBody(Body):
    """The body of /update_weights: a file, folder, hub id or URL with weights, all or some."""

    path: str
    weight_version: str | None = None


class LoadAdapterBody(Body):
    """The body of /v1/load_lora_adapter: a name, and a folder in PEFT's layout.

    With ``load_inplace``, one that has this name is updated; without one, it is loaded.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """The body of /v1/unload_lora_adapter; the number is vLLM's."""

    lora_name: str
    lora_int_id: int | None = None


class ResetBody(Body):
    """The body of /reset_prefix_cache: vLLM's fields, which change nothing here."""

    reset_running_requests: bool = False
    reset_connector: bool = False


class AbortBody(Body):
    """The body of /abort."""

    request_id: str


async def health(state: State, body: Body) -> dict[str, Any]:
    """Answer 200 if the engine lives, 503 while it is loading or after it has ended."""
    llm = state.engine()
    try:
        await llm.check_health()
    except RuntimeError as error:
        raise ApiError(503, str(error), code="engine_dead") from error
    return {"status": "ok"}


async def ready(state: State, body: Body) -> dict[str, Any]:
    """Answer 200 if requests are computed now; 503 also while the engine is paused or sleeps."""
    await health(state, body)
    llm = state.engine()
    if llm.is_paused:
        raise ApiError(503, "the engine is paused", code="not_ready")
    if llm.llm.engine.refusal is not None and not llm.llm.no_text:
        raise ApiError(503, llm.llm.engine.refusal, code="not_ready")
    return {"status": "ready"}


async def version(state: State, body: Body) -> dict[str, Any]:
    """Return the version of this package."""
    return {"version": __version__}


async def metrics(state: State, body: Body) -> str:
    """Return the engine's metrics, between two steps."""
    found = await state.engine().call(lambda llm: llm.get_metrics())
    return prometheus_text(found, state.names[0])


async def models(state: State, body: Body) -> dict[str, Any]:
    """List the names of the model, and its adapters."""
    llm = state.engine().llm

    def entry(name: str, root: str, parent: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.loaded,
            "owned_by": "vllm-module",
            "root": root,
            "parent": parent,
            "max_model_len": llm.model_config.max_model_len,
        }

    entries = [entry(name, llm.model_config.model) for name in state.names]
    adapters = [*llm.engine.adapters.values()]  # without the lock, which a step holds
    entries += [entry(each.name, each.path, state.names[0]) for each in adapters]
    return {"object": "list", "data": entries}


async def summary(state: State, body: Body) -> dict[str, str]:
    """Return what was loaded and what memory it takes, as texts for people."""
    return dict(await state.engine().call(lambda llm: llm.facts()))


async def pause(state: State, body: PauseBody) -> dict[str, Any]:
    """Pause the engine; see :meth:`~vllm_module.AsyncLLM.pause`."""
    await state.engine().pause(body.mode, clear_cache=body.clear_cache)
    return {"status": "paused"}


async def resume(state: State, body: Body) -> dict[str, Any]:
    """Compute steps again."""
    await state.engine().resume()
    return {"status": "resumed"}


async def sleep(state: State, body: SleepBody) -> dict[str, Any]:
    """Free the memory of weights and cache; see :meth:`~vllm_module.AsyncLLM.sleep`."""
    engine = state.engine()
    try:
        await engine.sleep(body.level, body.mode)
    except RuntimeError as error:
        if not engine.is_sleeping:
            raise
        raise ApiError(409, "the engine sleeps already: ask /wake_up first") from error
    return {"status": "sleeping"}


async def wake_up(state: State, body: WakeBody) -> dict[str, Any]:
    """Wake up with weights, cache or both; see :meth:`~vllm_module.LLM.wake_up`."""
    engine = state.engine()
    await engine.wake_up(body.tags)
    return {"status": "sleeping" if engine.is_sleeping else "awake"}  # weights or cache may


async def is_sleeping(state: State, body: Body) -> dict[str, Any]:
    """Tell whether weights or cache sleep."""
    return {"is_sleeping": state.engine().is_sleeping}


async def update_weights(state: State, body: UpdateBody) -> dict[str, Any]:
    """Update weights between two steps, with those of a file, folder, hub id or URL.

    A file that is sent again after it was taken, as when a client or one of several engines has
    missed the answer, changes nothing. It is refused if its weights are gone since.
    """
    engine = state.engine()
    opened = await asyncio.to_thread(open_update, body.path)  # beside the steps

    def update(llm: LLM) -> None:
        with opened:
            wanted = body.weight_version or opened.version
            taken = opened.after is not None and opened.version == llm.weight_version == wanted
            if taken and not llm.executor.needs_whole:
                return
            llm.update_weights(opened, weight_version=body.weight_version)

    await engine.call(update)
    return {"weight_version": engine.weight_version}


async def load_adapter(state: State, body: LoadAdapterBody) -> dict[str, Any]:
    """Load an adapter between two steps, or update one; its name is that of a model then."""
    if body.lora_name in state.names:
        raise ApiError(400, f"the model is called {body.lora_name!r}", "lora_name")

    def load(llm: LLM) -> None:
        if body.load_inplace and body.lora_name in llm.engine.adapters:
            llm.update_adapter(body.lora_name, body.lora_path)
        else:
            llm.load_adapter(body.lora_name, body.lora_path)

    await state.engine().call(load)
    return {"status": "loaded"}


async def unload_adapter(state: State, body: UnloadAdapterBody) -> dict[str, Any]:
    """Unload an adapter that no request uses."""

    def unload(llm: LLM) -> None:
        try:
            llm.unload_adapter(body.lora_name)
        except RuntimeError as error:
            raise ApiError(409, str(error), "lora_name") from None

    await state.engine().call(unload)
    return {"status": "unloaded"}


async def weight_version(state: State, body: Body) -> dict[str, Any]:
    """Return the name of the weights, which the last update gave."""
    return {"weight_version": state.engine().weight_version}


async def world_size(state: State, body: Body) -> dict[str, Any]:
    """Return the number of ranks, as vLLM does."""
    return {"world_size": state.engine().llm.executor.size}


async def server_info(state: State, body: Body) -> dict[str, Any]:
    """Return of vLLM's configuration what its clients read."""
    llm = state.engine().llm
    config, model = llm.executor.worker.config, llm.model_config
    parallel = {
        "tensor_parallel_size": llm.executor.size // config.pipeline_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
    }
    told = {
        "model_config": {
            "model": model.model,
            "max_model_len": model.max_model_len,
            "logprobs_mode": config.logprobs_mode,
        },
        "parallel_config": parallel,
        "lora_config": {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank},
        "weight_transfer_config": None,  # vLLM's own protocol, over NCCL
    }
    return {"vllm_config": told}


async def reset_prefix_cache(state: State, body: ResetBody) -> dict[str, Any]:
    """Evict cached pages between two steps."""
    return {"success": await state.engine().reset_prefix_cache()}


async def abort(state: State, body: AbortBody) -> dict[str, Any]:
    """End a request by the id of its answer; its client gets what there is."""
    await state.engine().abort(body.request_id)
    return {"request_id": body.request_id}

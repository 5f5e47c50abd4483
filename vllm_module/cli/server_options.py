"""The options of a server: where it listens, who may ask and how much, its steps and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_module.base.messages import printable
from vllm_module.cli.options import Options


@dataclass(frozen=True)
class ServedAdapterOptions(Options):
    """The LoRA adapters that a server has from the start, by vLLM's names."""

    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="A LoRA adapter, and the name by which requests ask for it as their model; may be "
            "repeated.",
            show_default=False,
        ),
    ] = None
    max_loras: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Most adapters in one step; requests of others wait in turn."
        ),
    ] = 8
    max_cpu_loras: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most adapters in memory; others are read again from their folders when a request "
            "needs them. Default: all stay.",
        ),
    ] = None

    def folders(self, model: Sequence[str]) -> dict[str, str]:
        """Return the folders by name; raise a usage error for a name that is given twice."""
        found: dict[str, str] = {}
        for given in self.lora_modules or ():
            name, is_pair, folder = given.partition("=")
            if not (name and is_pair and folder):
                problem = f"expected NAME=DIR, got {printable(given)!r}"
            elif name in found or name in model:
                problem = f"two models are called {printable(name)!r}"
            else:
                found[name] = folder
                continue
            raise typer.BadParameter(problem, param_hint="--lora-modules")
        return found


@dataclass(frozen=True)
class StepOptions(Options):
    """How much an engine computes at once, and the memory of its cache, by vLLM's names."""

    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most samples in a step; others wait.")
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Most tokens in a step; longer prompts are computed in several steps.",
        ),
    ] = 2048
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            metavar="X",
            help="Share of a GPU's memory for weights, one step and the KV cache.",
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Bytes of the KV cache on each rank, instead of that share. On a CPU 1 GiB, "
            "unless given.",
            show_default=False,
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager",
            help="Compute every step without CUDA graphs, and without recordings on a CPU.",
        ),
    ] = False


@dataclass(frozen=True)
class ServerOptions(Options):
    """Where a server listens, who may ask, and how much."""

    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 for every one.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 takes any that is free.")
    ] = 8000
    uds: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Listen on a Unix socket instead.", show_default=False),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate, for https.", show_default=False),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key of the certificate.", show_default=False),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="VLLM_MODULE_API_KEY",
            help="Key that clients have to send; may be repeated. Without one, all may ask. In the "
            "environment, other users of the machine do not see it.",
            show_default=False,
        ),
    ] = None
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="VLLM_MODULE_ADMIN_KEY",
            help="Key for the paths of operators, which are off without one.",
            show_default=False,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose pages may ask, such as https://chat.example; may be repeated, and * "
            "is every one. Without one, a browser lets only the server's own page ask.",
            show_default=False,
        ),
    ] = None
    weights_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve the weights there, too: another engine loads replica://HOST:PORT, with the "
            "admin key in VLLM_MODULE_REPLICA_TOKEN.",
            show_default=False,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model in requests; may be repeated. Default: CKPT as given.",
            show_default=False,
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Engines, each with its own processes and weights, or with "
            "--enable-expert-parallel some of the experts that they share. A request goes to the "
            "one that had the beginning of its prompt, or that has the least to do.",
        ),
    ] = 1
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Samples that may wait beside those of a step; more are refused with 503.",
        ),
    ] = 1024
    max_prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most prompts of one request.")
    ] = 256
    max_body_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Largest body of a request.")
    ] = 16
    max_connections: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Most open connections; more are answered with 503 and closed."
        ),
    ] = 4096
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes calls of tools: hermes, qwen3_coder, glm, llama3, mistral, "
            "deepseek, kimi, harmony or none. auto: as its chat template says.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto: reasoning between the marks of the chat template is apart from content; "
            "none: it is content.",
        ),
    ] = "auto"
    stop_seconds: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="At the first SIGTERM or Ctrl-C, running requests may take this long; the second "
            "ends them.",
        ),
    ] = 30

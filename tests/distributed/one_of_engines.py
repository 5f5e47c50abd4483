"""One of several engines that share experts, in a process that tests start by ``runpy.run_path``.

Its globals have a ``connection``. From there come tuples: the name of a function below, its
arguments and options. What it returns goes back, or the text of its error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_module import LLM, SamplingParams
from vllm_module.layers.fused_moe import FusedMoE


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    """Return the tokens of each sample of each prompt."""
    asked = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 10, **params})
    given = [{"prompt_token_ids": each} for each in prompts]
    outputs = llm.generate(given, asked, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def update(llm: LLM, file: str) -> None:
    llm.update_weights(load_file(file))


def experts(llm: LLM) -> list[list[list[int]]]:
    """Return the experts that each rank has, by layer."""
    found = llm.collective_rpc("placed_experts")
    return [[[*each.kept] for each in of_rank.values()] for of_rank in found]


def rounds(llm: LLM) -> int:
    """Return the number of rounds so far."""
    assert llm.executor.rounds is not None
    return llm.executor.rounds.number


def preemptions(llm: LLM) -> int:
    return llm.engine.scheduler.preemptions


def fail_in_steps(llm: LLM) -> None:
    """Let every step fail on this engine."""

    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of this engine alone")

    modules = llm.executor.worker.model.modules()
    layer: Any = next(each for each in modules if isinstance(each, FusedMoE))
    layer.w2.forward = forward


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (generate, update, experts, rounds, preemptions, fail_in_steps)
}


def main(connection: Connection, folder: str, settings: dict[str, Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    entries = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 1 << 20, **settings}
    try:
        llm = LLM(folder, skip_tokenizer_init=True, enable_expert_parallel=True, **entries)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    with llm:
        connection.send("ready")
        while (message := connection.recv()) is not None:
            name, arguments, options = message
            function = FUNCTIONS[name] if name in FUNCTIONS else getattr(LLM, name)
            try:
                connection.send(function(llm, *arguments, **options))
            except Exception as error:
                connection.send(f"{type(error).__name__}: {error}")
    connection.send("closed")


if __name__ == "engine":
    main(*globals()["ARGUMENTS"])

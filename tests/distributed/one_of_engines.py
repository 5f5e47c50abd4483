"""One of several engines that share experts, in a process that tests start by ``runpy.run_path``.

Its globals have a ``connection``. From there come tuples: the name of a function below, its
arguments and options. What it returns goes back, or the text of its error.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul.products import Products
from vllm_module.layers.fused_moe import FusedMoE
from vllm_module.runtime.ranks import executor
from vllm_module.runtime.step_inputs import StepInputs


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


def generate_late(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    """Do as ``generate`` with pauses before steps, whose logits are in one memory, as of graphs."""
    assert llm.executor.worker.runner is not None
    step, run = llm.engine.step, llm.executor.worker.runner.run
    memory = torch.zeros(len(prompts), llm.source.config.vocab_size)

    def late(on_step: Any = None) -> Any:
        time.sleep(0.2)
        return step(on_step)

    def overwriting(inputs: Any, sampled: Any = None) -> torch.Tensor:
        logits = run(inputs, sampled)
        memory.copy_(torch.arange(memory.numel()).view_as(memory).flip(0, 1))  # of padding
        memory[: len(logits)] = logits
        return memory[: len(logits)]

    replaced: Any = llm.engine
    replaced.step, llm.executor.worker.runner.run = late, overwriting  # type: ignore[method-assign]
    try:
        return generate(llm, prompts, **params)
    finally:
        replaced.step, llm.executor.worker.runner.run = step, run  # type: ignore[method-assign]


def interrupt_close(llm: LLM) -> str | None:
    """Return why the engine has ended, after Ctrl-C while it is being closed."""
    _take_interrupts()
    rounds = llm.executor.rounds
    assert rounds is not None

    def interrupt() -> None:
        while not rounds._has_left:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    return _close_interrupted(llm)


def interrupt_telling(llm: LLM) -> str | None:
    """Do as ``interrupt_close``, before the other engines are told."""
    _take_interrupts()
    rounds: Any = llm.executor.rounds
    rounds._tell = lambda *_: signal.raise_signal(signal.SIGINT)
    return _close_interrupted(llm)


def _take_interrupts() -> None:
    """Take Ctrl-C as a script does; the process that this one is forked from may block it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_interrupted(llm: LLM) -> str | None:
    try:
        llm.close()
    except KeyboardInterrupt:
        return llm.executor.end
    return "not interrupted"


def step_after_end(llm: LLM) -> None:
    """Compute a step that was asked for before the engine has ended, which another thread found."""
    while llm.executor.end is None:
        time.sleep(0.01)
    llm.executor.run(StepInputs.nothing())


def close_in_a_step(llm: LLM) -> str | None:
    """Return why the engine has ended that is closed by its own step, as by a signal handler."""
    first_of(llm).w2.forward = lambda *_, **__: llm.close()
    with suppress(Exception):
        generate(llm, [[1, 2]])
    return llm.executor.end


def first_of(llm: LLM) -> Any:
    """Return the first layer with experts."""
    modules = llm.executor.worker.model.modules()
    return next(each for each in modules if isinstance(each, FusedMoE))


def fork(llm: LLM) -> int | None:
    """Return the status with which a fork of this process exits; ``None`` if it hangs."""
    if not (pid := os.fork()):
        atexit._run_exitfuncs()
        os._exit(0)
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        if (ended := os.waitpid(pid, os.WNOHANG)) != (0, 0):
            return ended[1]
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def wait_for_device(llm: LLM) -> None:
    """Wait for an event that a device never reaches."""

    class Never:
        def query(self) -> bool:
            return False

    event: Any = Never()
    llm.executor.wait(event)


def fail_in_steps(llm: LLM, stops: bool = False) -> None:
    """Let every step fail on this engine, or stop its process."""

    def forward(*_: Any, **__: Any) -> Any:
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("a fault of this engine alone")

    first_of(llm).w2.forward = forward


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        generate, generate_late, interrupt_close, interrupt_telling, close_in_a_step,
        step_after_end, fork, wait_for_device, update, experts, rounds, preemptions, fail_in_steps,
    )
}  # fmt: skip


def main(connection: Connection, folder: str, settings: dict[str, Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if settings.pop("loops", False):  # which tiny weights would not gain from
        executor.fastest_for = lambda *_, **__: Products(floats=range(1, 9), pages=True)
    entries = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 1 << 20, **settings}
    try:
        made = LLM(folder, skip_tokenizer_init=True, enable_expert_parallel=True, **entries)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    llm: LLM | None = made
    del made
    connection.send("ready")
    while (message := connection.recv()) is not None:
        name, arguments, options = message
        if name == "drop":
            llm = None
            gc.collect()
            connection.send("dropped")
            continue
        function = FUNCTIONS[name] if name in FUNCTIONS else getattr(LLM, name)
        try:
            connection.send(function(llm, *arguments, **options))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
    if llm is not None:
        llm.close()
    connection.send("closed")


if __name__ == "engine":
    main(*globals()["ARGUMENTS"])

"""A checkpoint, executors of its ranks, a step, and processes that have to end.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.config import EngineConfig
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.step_inputs import StepInputs

HERE = Path(__file__).parent
PAGE = 16
FOLLOWING = runpy.run_path(str(HERE / "following.py"))
SUPPORT = runpy.run_path(str(HERE.parents[1] / "support.py"))
Weights = dict[str, torch.Tensor]
CONFIG = AutoConfig.for_model(
    "qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=130,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=6,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def weights(seed: int) -> Weights:
    torch.manual_seed(seed)
    state: Weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()
    return {name: tensor * (1 if "norm" in name else 8) for name, tensor in state.items()}


def executor(folder: Path, size: int, **config: Any) -> Executor:
    return Executor(
        ModelConfig(model=str(folder)),
        LoadConfig(),
        DeviceConfig(device="cpu"),
        EngineConfig(tensor_parallel_size=size, **{"kv_cache_memory_bytes": 1 << 23, **config}),
    )


def close_all(engines: list[Executor]) -> None:
    while engines:
        engines.pop().close()


def started(engines: list[Executor], folder: Path, size: int) -> Executor:
    """Return the engine that is running if it has this size; otherwise start one."""
    if not engines or engines[0].size != size:
        close_all(engines)
        engines.append(executor(folder, size))
        engines[0].start(256)
    return engines[0]


def step(lengths: list[int], counts: list[int]) -> StepInputs:
    """Compute the last ``counts`` tokens of sequences of ``lengths``, each on its own pages."""
    inputs = StepInputs([], [], [], lengths, [0], [], [], 16, [], max(counts))
    page = 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = list(range(page, page + -(-length // PAGE)))
        page += 16
        places = range(length - count, length)
        inputs.input_ids += [(7 * place + index) % 130 for place in places]
        inputs.positions += places
        inputs.slot_mapping += [pages[place // PAGE] * PAGE + place % PAGE for place in places]
        inputs.table_rows.append(index)
        inputs.new_pages.append((index, 0, pages))
        inputs.query_start_loc.append(len(inputs.input_ids))
        inputs.rows.append(len(inputs.input_ids) - 1)
    return inputs


PREFILL = step([3, 16, 33], [3, 16, 33])


def logits(made: Executor) -> torch.Tensor:
    return made.run(PREFILL).clone()


def wait_until_gone(pids: list[int]) -> None:
    SUPPORT["wait_until"](lambda: not alive(pids), f"{pids} end")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        # A zombie has ended; not every system removes those whose parent is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]

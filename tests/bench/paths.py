"""How many functions and files of ours a call passes through; nothing is timed.

    python tests/bench/paths.py

"load" counts the functions on the stack when the name of one tensor is recorded, and when its bytes
are read. "build" counts the functions that run from ``get_model`` until the first linear layer is
built, and "generate" those that run in ``LLM.generate`` for one token of a model with two layers.
With -v, the functions are listed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import vllm_module
from vllm_module import LLM, ModelConfig, SamplingParams, get_model, vLLMModule
from vllm_module.layers import QKVParallelLinear, RowParallelLinear
from vllm_module.weights import open_checkpoint

HOUSE = Path(vllm_module.__file__).resolve().parents[1]
Function = tuple[str, str]
RECORDS: Function = ("vllm_module/core/planner.py", "fill")


def function_of(frame: FrameType) -> Function | None:
    """Return the file and the name of a function of ours; lambdas and comprehensions are none."""
    name = frame.f_code.co_name
    path = Path(frame.f_code.co_filename)
    if name.startswith("<") or not path.is_absolute():
        return None
    path = path.resolve()
    folders = ("vllm_module", "models", "kernels")
    if not path.is_relative_to(HOUSE) or path.relative_to(HOUSE).parts[0] not in folders:
        return None
    return str(path.relative_to(HOUSE)), name


def profiled(work: Callable[[], object], look: Callable[[FrameType, str, Any], None]) -> None:
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)


def stack(frame: FrameType | None) -> list[Function]:
    found = []
    while frame is not None:
        found.append(function_of(frame))
        frame = frame.f_back
    return [function for function in reversed(found) if function is not None]


def way_of_a_tensor(folder: Path) -> list[Function]:
    class Model(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.proj = RowParallelLinear(8, 8, bias=False)

    save_file({"proj.weight": torch.rand(8, 8)}, folder / "model.safetensors")
    model, way = Model(), {}
    pairs = open_checkpoint(folder).items()  # which reads headers

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and function_of(frame) == RECORDS:
            way.setdefault("recorded", stack(frame))
        elif event == "c_call" and argument.__name__ == "preadv":
            way.setdefault("read", stack(frame))

    profiled(lambda: model.load_weights(pairs), look)
    return list(dict.fromkeys(way["recorded"] + way["read"]))


def functions_run(work: Callable[[], object], until: type | None = None) -> list[Function]:
    """Return the functions that ``work`` runs, in order, until an ``until`` is being built."""
    run: dict[Function, None] = {}
    built = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal built
        if event == "call" and not built and (function := function_of(frame)) is not None:
            run[function] = None
            built = function[1] == "__init__" and type(frame.f_locals.get("self")) is until

    profiled(work, look)
    return list(run)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        tensor, model = Path(temporary, "tensor"), Path(temporary, "model")
        tensor.mkdir()
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            )
        ).save_pretrained(model)  # fmt: skip
        config = ModelConfig(model=str(model))
        llm = LLM(str(model))
        params = SamplingParams(max_tokens=1)
        prompt: Any = {"prompt_token_ids": [1, 2, 3]}
        ways = {
            "load": way_of_a_tensor(tensor),
            "build": functions_run(lambda: get_model(model_config=config), QKVParallelLinear),
            "generate": functions_run(lambda: llm.generate([prompt], params)),
        }
        llm.close()
    for name, functions in ways.items():
        files = {file for file, _ in functions}
        print(f"{name}: {len(functions)} functions in {len(files)} files")
        for file, function in functions if "-v" in sys.argv else ():
            print(f"    {file}: {function}")


if __name__ == "__main__":
    main()

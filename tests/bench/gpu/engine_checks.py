"""Job: engines on the device against transformers, against our own on the CPU, and their loading.

Everything is of tiny models with random weights, which are saved by transformers.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from gpu.attempt import attempt
from gpu.change_checks import check_adapters, check_updates
from gpu.check import SMALLEST
from gpu.device import Gpu
from gpu.hybrid_checks import check_hybrids
from gpu.row_checks import check_rows
from gpu.small_engines import NEW, demand, engine, few, generated, relative, saved, scored
from gpu.worker import Emit
from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.errors import RankError


def main(emit: Emit, device: Gpu, what: list[str], over: list[str]) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    emit(facts=device.facts() | {"transformers": transformers.__version__})
    for name in what:
        with tempfile.TemporaryDirectory() as directory:
            CHECKS[name](partial(named, emit, over, name), device, Path(directory))


def named(
    emit: Emit, over: list[str], group: str, name: str, work: Callable[[], dict[str, Any]]
) -> None:
    """Emit what a check found, or how it failed, if it is not ``over``."""
    what = {"name": f"{group}: {name}", "operation": group}
    if what["name"] not in over:
        attempt(emit, what, lambda: {"check": work()})


@torch.inference_mode()
def reference_logits(
    folder: Path, device: str, dtype: torch.dtype, sequences: Sequence[list[int]]
) -> list[torch.Tensor]:
    """Return transformers' logits of all tokens but the last, for each sequence."""
    # Eager attention writes the softmax out: another kernel than the one that is checked.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = model.eval().to(device)
    return [
        model(torch.tensor([s[:-1]], device=device)).logits[0].float().cpu() for s in sequences
    ]  # fmt: skip


def logprobs(logits: Sequence[torch.Tensor], sequences: Sequence[list[int]]) -> torch.Tensor:
    return torch.cat([
        each.log_softmax(-1).gather(-1, torch.tensor(s[1:])[:, None]).squeeze(-1)
        for each, s in zip(logits, sequences, strict=True)
    ])  # fmt: skip


def check_tokens(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Greedy tokens and logprobs of every sequence are transformers', with graphs and without."""

    def compare(path: Path, dtype: torch.dtype, eager: bool) -> dict[str, float]:
        with engine(path, device.name, dtype=dtype, enforce_eager=eager) as llm:
            found = generated(llm)
            captured = llm.executor.worker.runner._sizes[False]
        if not device.dry:  # prompts are computed in steps of up to 32 tokens
            assert captured == ([] if eager else [16, 32]), f"graphs of {captured} tokens"
        sequences = [sequence for sequence, _ in found]
        # The truth is computed in more precision than both are; the CPU has float64.
        exact = reference_logits(path, "cpu", torch.float64, sequences)
        plain = reference_logits(path, device.name, dtype, sequences)
        truth = logprobs(exact, sequences)
        # Twice what transformers is off in the same dtype: no two ways of adding up agree.
        error = relative(torch.cat([values for _, values in found]), truth)
        allowed = 2 * relative(logprobs(plain, sequences), truth) + 10 * SMALLEST
        result = demand(error, allowed, "the error of the logprobs")
        # A token whose logit is that close to the greatest may be chosen in its place. Two logits
        # are off by twice what transformers' worst one is, each: four times its error.
        off = max(float((a - b).abs().max()) for a, b in zip(plain, exact, strict=True))
        gap = max(
            float((each.max(-1).values - each.gather(-1, torch.tensor(s[1:])[:, None])[:, 0])
                  [-NEW:].max())
            for each, s in zip(exact, sequences, strict=True)
        )  # fmt: skip
        demand(gap, 4 * off + 1e-4, "a chosen token's logit is below the greatest by")
        return result | {"gap": gap}

    for kind in few(("qwen3", "llama"), device):
        path = saved(folder, kind)
        for dtype in (torch.float32, torch.bfloat16):
            for eager in few((False, True), device):
                name = f"{kind} {str(dtype)[6:]} {'eager' if eager else 'graphs'}"
                test(name, partial(compare, path, dtype, eager))


def check_eight_bits(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """FP8 weights and an FP8 cache give the logprobs of our own engine on the CPU."""
    path = saved(folder, "qwen3")

    def compare(options: dict[str, Any]) -> dict[str, float]:
        with engine(path, device.name, dtype="bfloat16", **options) as llm:
            found = generated(llm)
        sequences = [sequence for sequence, _ in found]
        with engine(path, "cpu", dtype="float32", **options) as llm:
            truth, _ = scored(llm, sequences)
        with engine(path, "cpu", dtype="float32") as llm:
            wide, _ = scored(llm, sequences)
        # The CPU rounds weights, or keys and values, and nothing else. The device rounds inputs of
        # products to the same format, and bfloat16 moves some values to the next one of eight bits:
        # each moves logprobs about as far as the CPU's rounding does. Twice that is allowed; a
        # wrong or missing scale moves them by many times that.
        error = relative(torch.cat([values for _, values in found]), truth)
        return demand(error, 2 * relative(truth, wide), "the distance to the CPU's logprobs")

    for name, options in few({
        "per channel": {"quantization": "fp8_per_channel"},
        "cache": {"kv_cache_dtype": "fp8"},
        "per tensor": {"quantization": "fp8_per_tensor"},
        "per block": {"quantization": "fp8_per_block"},
    }.items(), device, 2):  # fmt: skip
        test(name, partial(compare, options))


def check_loading(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """What is loaded onto the device has the bits of what is loaded onto the CPU."""
    path = saved(folder, "qwen3")

    def compare(options: dict[str, Any]) -> dict[str, int]:
        config = ModelConfig(model=str(path), **options)
        ours, theirs = (
            get_model(model_config=config, device_config=DeviceConfig(device=each))
            for each in (device.name, "cpu")
        )
        mine = dict([*ours.named_parameters(), *ours.named_buffers()])
        expected = dict([*theirs.named_parameters(), *theirs.named_buffers()])
        assert mine.keys() == expected.keys(), f"{mine.keys() ^ expected.keys()}"
        for name, tensor in expected.items():
            got = mine[name].detach().cpu()
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            # Angles of positions are computed where the model is, and not loaded.
            if name in dict(theirs.named_parameters()):
                bits = (x.detach().contiguous().view(torch.uint8) for x in (got, tensor))
                assert torch.equal(*bits), f"{name} has other bits"
        return {"tensors": len(expected)}

    for name, options in few({
        "bfloat16": {"dtype": "bfloat16"},
        "float16": {"dtype": "float16"},
        "fp8 per tensor": {"quantization": "fp8_per_tensor"},
        "fp8 per channel": {"quantization": "fp8_per_channel", "dtype": "bfloat16"},
        "fp8 per block": {"quantization": "fp8_per_block", "dtype": "bfloat16"},
        "int8": {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"},
    }.items(), device, 1):  # fmt: skip
        test(name, partial(compare, options))


def check_ranks(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Two ranks capture graphs and give one rank's tokens; if one is killed, the engine says so."""
    if device.dry or torch.cuda.device_count() < 2:
        test("two devices", lambda: {"skipped": "there are no two devices"})
        return
    path = saved(folder, "qwen3")

    def same() -> dict[str, float]:
        with engine(path, device.name, dtype="float32") as llm:
            alone = generated(llm)
        with engine(path, device.name, dtype="float32", tensor_parallel_size=2) as llm:
            both = generated(llm)
        assert [x for x, _ in alone] == [x for x, _ in both], "other tokens"
        return {"sequences": len(both)}

    def killed() -> dict[str, str]:
        with engine(path, device.name, dtype="float32", tensor_parallel_size=2) as llm:
            generated(llm)
            for process in multiprocessing.active_children():
                process.kill()
            try:
                generated(llm)
            except RankError as error:
                return {"said": str(error)[:200]}
        raise AssertionError("the engine served on without a rank")

    test("tokens", same)
    test("a killed rank", killed)


CHECKS: dict[str, Callable[[Callable[..., None], Gpu, Path], None]] = {
    "tokens": check_tokens,
    "eight bits": check_eight_bits,
    "rows": check_rows,
    "hybrids": check_hybrids,
    "loading": check_loading,
    "ranks": check_ranks,
    "adapters": check_adapters,
    "updates": check_updates,
}

"""Candidates of a kernel: the default, what was measured, and trials."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.kernels import choices, dtypes
from vllm_module.kernels.attention import paged_attention_decode
from vllm_module.kernels.choices import choose, trying
from vllm_module.kernels.rows import rms_norm

CANDIDATES = {"first": 1, "second": 2}
CUDA = torch.device("cuda", 0)


@pytest.fixture
def measured(monkeypatch) -> None:
    """Stand for a GPU of one name, for which something was measured: there is none here."""
    table = {"GPU": {"kernel": {"measured": "second", "gone": "third"}}}
    monkeypatch.setattr(choices, "_measured", lambda: table)
    monkeypatch.setattr(choices, "_gpu", lambda device: "GPU")


@pytest.mark.parametrize(
    ("kernel", "case", "device", "chosen"),
    [
        ("kernel", "measured", CUDA, 2),
        ("kernel", "other", CUDA, 1),
        ("other", "measured", CUDA, 1),
        ("kernel", "measured", torch.device("cpu"), 1),
    ],
)
def test_what_was_measured_is_chosen(kernel, case, device, chosen, measured) -> None:
    """The first candidate runs, unless another was measured for this GPU, kernel and case."""
    assert choose(kernel, case, CANDIDATES, device) == chosen


def test_a_trial_comes_before_what_was_measured(measured) -> None:
    """Inside of trying, the given candidates run; afterwards the chosen ones again."""
    with trying({"kernel": "first"}):
        assert choose("kernel", "measured", CANDIDATES, CUDA) == 1
        with trying({"other": "second"}):
            assert choose("kernel", "measured", CANDIDATES, CUDA) == 1
    assert choose("kernel", "measured", CANDIDATES, CUDA) == 2


def test_unknown_candidates_are_refused(measured) -> None:
    """A name that is no candidate is refused, whoever gave it."""
    with pytest.raises(ValueError, match="kernel has no candidate 'third' for 'gone': expected"):
        choose("kernel", "gone", CANDIDATES, CUDA)
    with pytest.raises(ValueError, match="no candidate 'none'"), trying({"kernel": "none"}):
        choose("kernel", "other", CANDIDATES, CUDA)


@pytest.mark.parametrize(
    ("own", "tiles"), [((8, 0), (8, 0)), ((9, 0), (9, 0)), ((10, 0), (10, 0)), ((12, 0), (8, 9))]
)
def test_tiles_fit_the_shared_memory_of_a_gpu(monkeypatch, own, tiles) -> None:
    """NVIDIA's guide: 163 KiB for a block of 8.0, 99 of 8.9, 227 of 9.0 and 10.0, 99 of 12.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: own)
    assert dtypes.capability(SimpleNamespace(is_cuda=True, device=CUDA)) == tiles


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_early_launches_are_candidates_of_hopper_alone(monkeypatch, capability) -> None:
    """They come after the default; and the interpreter, which has none, computes the same."""
    asked: dict[str, list[str]] = {}

    def note(kernel: str, case: str, candidates: Any, device: torch.device) -> Any:
        asked[kernel] = list(candidates)
        return choose(kernel, case, candidates, device)

    for module in (rms_norm, paged_attention_decode):
        monkeypatch.setattr(module, "capability", lambda _: capability)
        monkeypatch.setattr(module, "choose", note)
    x, weight = torch.randn(3, 32).half(), torch.randn(32).half()
    norm = rms_norm.rms_norm_triton(x, weight, 1e-6)
    sizes = 128, 4, 16, 2, 2, capability == (9, 0)
    asked["decode"] = list(paged_attention_decode.decode_candidates(*sizes))
    early = {kernel for kernel, names in asked.items() if "early" in " ".join(names)}
    assert early == ({"rms_norm", "decode"} if capability == (9, 0) else set())
    assert not any("early" in names[0] for names in asked.values())
    if early:
        with trying({"rms_norm": "launched early"}):
            assert torch.equal(rms_norm.rms_norm_triton(x, weight, 1e-6), norm)


def test_the_table_is_gpu_kernel_case_candidate() -> None:
    """The committed table has three levels, and names at the last one."""
    table = json.loads(Path(choices.__file__).with_name("choices.json").read_text())
    for kernels in table.values():
        for cases in kernels.values():
            assert all(isinstance(name, str) for name in cases.values())

"""Sampling sends one copy to a device, reads one back, and waits for nothing else.

Tensors on "meta" stand for those of a device: they have no values, so whatever reads one raises,
and so does every operation whose shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module.runtime import transfers
from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.sampling_params import SamplingParams

EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "min_p": 0.1},
    {"top_k": 5, "min_p": 0.1, "logprobs": 2},
    {"top_k": 500, "top_p": 0.5},
    {"top_p": 0.5, "logprobs": 100},
    {"top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
    {"temperature": 0, "presence_penalty": 0.3, "logit_bias": {3: 1.0}},
    {"logit_bias": {3: 1.0}},
]


TENSOR = torch.tensor


class Copies(TorchDispatchMode):
    """Counts what is copied from the host to the device, or used there from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.sent: list[int] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in given if t.dim()} | {t.device.type for t in made}
        if len(devices) > 1:
            self.others.append(str(func))
        return result

    def of_values(self, values: object, **options: Any) -> torch.Tensor:
        self.others.append("torch.tensor")
        return TENSOR(values, **options)

    def upload(self, arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        packed = transfers.pack(arrays, device)
        self.sent.append(packed.numel() // 8)  # numbers
        there = torch.empty(packed.shape, dtype=packed.dtype, device=device)
        return transfers.unpack(there, arrays)

    def download(self, numbers: torch.Tensor) -> Any:
        self.reads.append(numbers.numel())
        return SimpleNamespace(read=lambda wait: [1.0] * numbers.numel())


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Count copies: those of a device that is not there are replaced by ones that are counted."""

    @contextmanager
    def count() -> Iterator[Copies]:
        copies = Copies()
        monkeypatch.setattr(sampler, "upload", copies.upload)
        monkeypatch.setattr(sampler, "Download", copies.download)
        # No operation shows what torch.tensor does on "meta".
        monkeypatch.setattr(torch, "tensor", copies.of_values)
        with copies:
            yield copies

    return count


def mixed(count: int, steps: int, vocab: int) -> list[list[Row]]:
    """Return rows with all parameters, whose sequences get a token a step."""
    tokens = [[i % vocab for i in range(10 + index)] for index in range(count)]
    ways = [SamplingParams(**EVERYTHING[index % len(EVERYTHING)]) for index in range(count)]
    return [
        [
            Row(params, ids[: 8 + step], 4, 0.5, {1} if index % 5 == 2 else (), index)
            for index, (params, ids) in enumerate(zip(ways, tokens, strict=True))
        ]
        for step in range(steps)
    ]


@pytest.mark.parametrize("vocab", [90, 5003, 151_936])
@pytest.mark.parametrize("kinds", [1, 60])
def test_a_step_sends_once_and_reads_once(
    vocab: int, kinds: int, counting: Callable[[], Any]
) -> None:
    """However many rows there are, and of whatever mixture, a step makes two copies."""
    counts = TokenCounts()
    for rows in mixed(kinds, 3, vocab):
        logits = torch.empty(len(rows), vocab, dtype=torch.bfloat16, device="meta")
        with counting() as copies:
            sampler.sample(logits, rows, counts).read()
        assert len(copies.reads) == 1
        assert len(copies.sent) == (kinds > 1)  # nothing, if all take the most probable token
        assert copies.others == []


def test_prompt_logprobs_are_read_once(counting: Callable[[], Any]) -> None:
    """Many positions of a prompt make two copies."""
    with counting() as copies:
        sampler.prompt_logprobs(torch.empty(300, 5003, device="meta"), [7] * 300, 4)
    assert (len(copies.reads), len(copies.sent), copies.others) == (1, 1, [])


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, *_: x.argmax(-1)[:1].any() and x,
        lambda x, *_: x[x.sum(-1) > 0],
        lambda x, *_: x.nonzero(),
        lambda x, rows, *_: rows + rows.tolist()[0],
    ],
)
def test_a_wait_is_found(
    mistake: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    counting: Callable[[], Any],
) -> None:
    """A flag or number that is read, a boolean index and ``nonzero`` do not pass the test above."""
    monkeypatch.setattr(sampler, "draw_tokens", mistake)
    with counting(), pytest.raises((RuntimeError, NotImplementedError)):
        sampler.sample(torch.empty(60, 90, device="meta"), mixed(60, 1, 90)[0])


@pytest.mark.parametrize(
    "copied",
    [
        lambda: torch.tensor([3], device="meta"),
        lambda: torch.arange(1).to("meta"),
        lambda: torch.arange(1, device="meta").copy_(torch.arange(1)),
    ],
)
def test_a_copy_is_found(
    copied: Callable[[], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    counting: Callable[[], Any],
) -> None:
    """A list or tensor of the host that goes to the device by itself is counted."""
    monkeypatch.setattr(sampler, "draw_tokens", lambda x, rows, *_: rows + copied())
    with counting() as copies:
        sampler.sample(torch.empty(60, 90, device="meta"), mixed(60, 1, 90)[0])
    assert copies.others


def test_what_is_sent_does_not_grow_with_the_sequences(counting: Callable[[], Any]) -> None:
    """A sequence that is penalized sends its distinct tokens once, then a few numbers a step."""
    counts = TokenCounts()
    params = SamplingParams(repetition_penalty=1.3)
    sent = []
    for step in range(3):
        with counting() as copies:
            rows = [Row(params, range(2000 + step), 1000, 0.5, (), key) for key in range(4)]
            sampler.sample(torch.empty(4, 5003, device="meta"), rows, counts)
        sent += copies.sent
    assert sent[0] > 2 * 4 * 2000
    assert sent[1:] == [sent[1]] * 2
    assert sent[1] < 25 * 4

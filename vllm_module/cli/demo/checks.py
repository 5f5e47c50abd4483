"""What the demo checks at one tensor-parallel size, and transformers' tokens to compare with."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_module.build.model_source import ModelSource
from vllm_module.cli.output import CommandError
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.weights import Weight, read_into

CPU = torch.device("cpu")
_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order differ by less


@dataclass(frozen=True)
class SizeResult:
    """The results of one size: bytes that each rank read, and logits at all positions of a text."""

    tp_size: int
    bytes_read: list[int]
    logits: torch.Tensor

    def logits_difference(self, other: SizeResult) -> float:
        """Return the largest difference of logits; raise if rounding does not explain it."""
        difference = (self.logits - other.logits).abs().max().item()
        bound = _TOLERANCE * other.logits.abs().max().item()
        if not difference <= bound:
            raise CommandError(
                f"logits at tensor-parallel size {self.tp_size} differ from those at size "
                f"{other.tp_size} by {difference:g}, more than rounding explains ({bound:g})"
            )
        return difference


@torch.no_grad()
def run_size(source: ModelSource, tp_size: int, tokens: list[int]) -> SizeResult:
    """Load at ``tp_size``, each rank in a thread; check the shards and compute the logits."""

    def rank(rank: int) -> tuple[vLLMModule, int, torch.Tensor]:
        with source.open() as checkpoint:
            model: Any = source.build(CPU)
            model.load_weights(checkpoint.items())
            nbytes = checkpoint.bytes_read
        # Without a KV cache.
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)))
        return model, nbytes, model.compute_logits(hidden)

    models, bytes_read, logits = zip(*run_ranks(tp_size, rank), strict=True)
    for index in range(1, tp_size):
        if not torch.equal(logits[index], logits[0]):
            raise CommandError(f"rank {index} of {tp_size} computed other values than rank 0")
    with source.open() as checkpoint:
        check_shards(checkpoint, models)
    return SizeResult(tp_size, list(bytes_read), logits[0])


def check_shards(checkpoint: Mapping[str, Weight], models: Sequence[vLLMModule]) -> None:
    """Rebuild each checkpoint tensor from the ranks' shards and compare all bits.

    A model's plan maps the parts of a tensor to the parameter that they fill. Here the plan is
    used backwards: each part is copied from the parameter.
    """
    parts = defaultdict(list)
    for model in models:
        for each in model.plan_weights(checkpoint).fills:
            parts[each.name].append(each)
    for name, fills in parts.items():
        location = fills[0].location
        stored = torch.empty(checkpoint[name].shape, dtype=location.tensor.dtype)
        read_into(checkpoint[name], stored)
        rebuilt = torch.full_like(stored, torch.nan)
        for each in fills:
            for part, expected in zip(
                each._replace(weight=rebuilt).pieces(),
                each._replace(weight=stored).pieces(),
                strict=True,
            ):
                assert isinstance(part.source, torch.Tensor)
                assert isinstance(expected.source, torch.Tensor)
                part.source.copy_(part.target)
                if not torch.equal(part.target, expected.source):
                    raise CommandError(f"{location.path} holds other values than {name}")
        if not torch.equal(rebuilt, stored):
            raise CommandError(f"the shards of {len(models)} ranks do not cover {name}")


def transformers_tokens(
    folder: Path, prompt: list[int], count: int
) -> tuple[str, list[int]] | None:
    """Return transformers' version and its greedy tokens, or None if it is not installed."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    ids = torch.tensor([prompt])
    generated = model.eval().generate(ids, greedy, attention_mask=torch.ones_like(ids))
    return transformers.__version__, generated[0, len(prompt) :].tolist()

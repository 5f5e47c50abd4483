"""Comparing ranks in separate processes while they load, so that all have the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vllm_module.base.messages import printable, printable_name
from vllm_module.core.digests import ModelDigest, named_ranks
from vllm_module.core.module import vLLMModule
from vllm_module.core.report import fold
from vllm_module.core.tree import locations
from vllm_module.errors import RankError, WeightReadError
from vllm_module.hf_config import HFConfig
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import Rules
from vllm_module.weights.digests import DIGESTS, digest_weight, stored_digests
from vllm_module.weights.sharded_state import MANIFEST


def demand_same_tensors(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise ``RankError`` if ranks differ in a tensor that every rank keeps whole."""
    names = set(digests[0]).intersection(*digests[1:])
    demand_alike(
        [{name: of_rank[name] for name in of_rank if name in names} for of_rank in digests]
    )


def demand_alike(descriptions: Sequence[Mapping[str, str]]) -> None:
    """Raise ``RankError`` if descriptions, by rank, differ.

    The error names the ranks that differ from the majority, or all without one, and the entries.
    """
    ranks_of: dict[frozenset[tuple[str, str]], list[int]] = {}
    for rank, description in enumerate(descriptions):
        ranks_of.setdefault(frozenset(description.items()), []).append(rank)
    if len(ranks_of) == 1:
        return
    sets = sorted(ranks_of.values(), key=len, reverse=True)
    tie = len(sets[0]) == len(sets[1])
    named = sets if tie else sets[1:]
    ranks = [rank for of_one in named for rank in of_one]
    differ = "differ" if tie else f"differ{'s' if len(ranks) == 1 else ''} from the others"
    lines = [f"{' and '.join(map(_ranks, named))} of {len(descriptions)} {differ}:"]
    for name in dict.fromkeys(name for description in descriptions for name in description):
        values: dict[str, list[int]] = {}
        for rank, description in enumerate(descriptions):
            values.setdefault(description.get(name, "not there"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{_shorten(value)} on {_ranks(of)}" for value, of in values.items())
            lines.append(f"  {name}: {shown}")
    if len(lines) > 12:
        lines[12:] = [f"  and {len(lines) - 12} more"]
    lines.append("Give every rank the same checkpoint, configuration and dtype.")
    raise RankError("\n".join(lines), ranks, recoverable=True)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _shorten(value: str) -> str:
    return value if len(value) <= 50 else f"{value[:20]}..."


def describe(
    config: HFConfig,
    dtype: torch.dtype,
    rules: Rules | None,
    fingerprint: str,
) -> dict[str, str]:
    """Return the properties that determine a model, compared before a tensor is read."""
    entries = config.model_dump()
    settings = {
        f"config.json's {name}": json.dumps(entries[name], sort_keys=True, default=repr)
        for name in sorted(entries)
    }
    chosen = {"dtype": str(dtype), "quantization": repr(rules)}
    return {"checkpoint files": fingerprint, **chosen, **settings}


def digests(model: vLLMModule) -> dict[str, str]:
    """Return a digest of each tensor that this rank keeps whole, by its name."""
    # Without tensors computed from them, such as scales, which may depend on the sharding.
    tensors = {location.path: location.tensor for location in locations(model)}
    return {
        f"{name} after loading": digest_weight(tensor).hex
        for name, tensor in tensors.items()
        if tensor is not None and _is_whole(tensor)
    }


def _is_whole(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, BasevLLMParameter):
        return True
    shared = tensor.experts is not None and tensor.experts.size > 1
    return not shared and all(slot.parts == 1 for dim in tensor.dims for slot in dim.slots)


def demand_digests(folder: Path, size: int, of_ranks: Sequence[ModelDigest]) -> ModelDigest:
    """Return the digest of ranks together; compare it with what ``folder`` has stored, if anything.

    Those of a sharded state are compared rank by rank, others if all ``size`` ranks are there. What
    a load skips is not compared. Raises ``WeightReadError``, which names tensors and ranks, where
    ranks hold other copies of one part, or what was read is not what was stored.
    """
    held = sum(of_ranks, start=ModelDigest())
    stored = stored_digests(folder)
    if stored is None:
        return held
    where = printable(folder / DIGESTS)
    compared: list[tuple[tuple[int, ...], Mapping[str, str], Mapping[str, str]]] = []
    if not (folder / MANIFEST).exists():
        compared = [(held.ranks, held.tensors, stored[0])] if len(of_ranks) == size else []
    elif len(stored) != size:
        raise WeightReadError(
            f"{where} has digests of {len(stored)} ranks, and the sharded state is of {size}: "
            "shard the checkpoint again"
        )
    else:
        compared = [(each.ranks, each.parts, stored[each.ranks[0]]) for each in of_ranks]
    for ranks, digests, expected in compared:
        wrong = sorted(name for name, digest in digests.items() if expected.get(name) != digest)
        if wrong:
            raise WeightReadError(
                f"{', '.join(map(printable_name, fold(wrong)))}: {named_ranks(ranks)} read values "
                f"whose digests are not those in {where}: copy the files of weights again, or "
                "write the digests again if the change was meant"
            )
    return held

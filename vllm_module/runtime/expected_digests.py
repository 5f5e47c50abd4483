"""Updates of an engine's weights that say which digests tensors should have afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from vllm_module.base.messages import describe_error, printable_name
from vllm_module.cooperative import SentBoxes
from vllm_module.core.digests import ModelDigest, digest_of, source_digests
from vllm_module.core.named_tensors import NamedTensor, named_tensors
from vllm_module.core.report import fold
from vllm_module.errors import RankError, WeightReadError
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.weights.handle import Pairs


def update_and_compare(
    executor: Executor, weights: Pairs | SentBoxes, digests: Mapping[str, str]
) -> None:
    """Update the weights, and refuse to run if named tensors have other digests then.

    Raises as ``LLM.update_weights`` does.
    """
    own = _named(executor, weights, digests)
    single = {name: each[0].name for name, each in own.items() if len(each) == 1}
    kept = executor.apply_model(partial(_keep_digests, keep=True))
    both = partial(_held_and_sent, held=frozenset(single.values()), sent=frozenset(digests))
    try:
        executor.update_weights(weights)
        try:
            every = zip(*executor.apply_model(both), strict=True)
            held, sent = (sum(each, start=ModelDigest()).tensors for each in every)
        except (ValueError, WeightReadError) as error:
            executor.refusal = describe_error(error)
            raise
    finally:
        with suppress(RankError):  # ranks that have ended; the update has said so
            executor.apply_model(partial(_keep_digests, keep=kept[0]))
    # A tied tensor has several names, of which one came.
    came = {(single.get(name, name), digest) for name, digest in sent.items()}
    wrong = [
        name
        for name, digest in digests.items()
        if own[name]
        and digest != held.get(single.get(name, ""))
        and (single.get(name, name), digest) not in came
    ]
    if wrong:
        executor.refusal = (
            "after an update of the weights, the engine does not have the digests that it "
            f"should have of {', '.join(map(printable_name, fold(wrong)))}: send a whole "
            "checkpoint, or call reload_weights()"
        )
        raise WeightReadError(executor.refusal)


def _keep_digests(model: Any, *, keep: bool) -> bool:
    """Keep digests in later updates, or do not; return what it was."""
    kept, model.keep_digests = model.keep_digests, keep
    return bool(kept)


def _held_and_sent(
    model: nn.Module, *, held: frozenset[str], sent: frozenset[str]
) -> tuple[ModelDigest, ModelDigest]:
    """Return the digests of tensors as a rank holds them, and of tensors as they came."""
    came = source_digests(model)
    boxes = {name: boxes for name, boxes in came.boxes.items() if name in sent}
    return digest_of(model, names=held), ModelDigest(boxes, came.ranks)


def _named(
    executor: Executor, weights: Pairs | SentBoxes, digests: Mapping[str, str]
) -> dict[str, tuple[NamedTensor, ...]]:
    """Return which of the engine's tensors the names of ``digests`` stand for.

    Raises ``ValueError`` for a name that leads nowhere, or to several tensors that a mapping does
    not send as one, and ``WeightReadError`` if a tensor has another digest that it does not send.
    """
    executor.alone("a comparison of digests")
    sent = frozenset(weights) if isinstance(weights, Mapping) else frozenset[str]()
    known: dict[str, tuple[NamedTensor, ...]] = {}
    for of_rank in executor.apply_model(partial(named_tensors, names={*digests, *sent})):
        known |= of_rank  # pipeline stages have others
    if unknown := [name for name in digests if not (name in known or name in sent)]:
        raise ValueError(
            f"digests name {', '.join(map(printable_name, fold(unknown)))}, and the model has "
            "no such tensor: names are those of llm.digest(). Nothing was written to the model."
        )
    own = {name: known.get(name, ()) for name in digests}
    several = [name for name, each in own.items() if len(each) > 1 and name not in sent]
    if several and isinstance(weights, Mapping):
        parts = [each.name for each in own[several[0]]]
        raise ValueError(
            f"digests name {', '.join(map(printable_name, fold(several)))}, which the engine holds "
            f"as several tensors and the update does not send: name these, such as "
            f"{', '.join(map(printable_name, fold(parts)))}. Nothing was written to the model."
        )
    changed = {each.module for name in sent for each in known.get(name, ())}
    refused = not known.keys() >= sent  # by the model, which says so
    if not changed or None in changed or refused or not executor.can_run:
        return own
    same = {
        name: each[0].name
        for name, each in own.items()
        if name not in sent and each and changed.isdisjoint(one.module for one in each)
    }
    of_ranks = executor.apply_model(partial(digest_of, names=frozenset(same.values())))
    held = sum(of_ranks, start=ModelDigest()).tensors
    if wrong := [name for name, own_name in same.items() if digests[name] != held[own_name]]:
        raise WeightReadError(
            f"the update does not send {', '.join(map(printable_name, fold(wrong)))}, and the "
            "engine does not have the digests that it should have of them: send them, too, or "
            "leave out their digests. Nothing was written to the model."
        )
    return own

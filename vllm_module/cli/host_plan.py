"""The plan of each host: what its ranks read and keep together, and what it sends to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from vllm_module.cli.model_plan import ModelPlan, print_columns
from vllm_module.cli.output import print_text, size
from vllm_module.cli.rank_plan import RankPlan
from vllm_module.cli.tensor_plan import rank_list
from vllm_module.layout import layout_of_stages
from vllm_module.layout.sharing import bytes_by_holders
from vllm_module.runtime.ranks.wire import Wire


@dataclass(frozen=True)
class HostPlan:
    """What a host reads, keeps and sends.

    Attributes:
        host: its number.
        ranks: of the engine: those of the last stage come first, as rank 0 samples.
        stages: numbers of the stages that it has ranks of.
        bytes_read: of the checkpoint, each byte once for all ranks of the host.
        bytes_read_together: the same if the ranks of a stage, on all hosts, read each byte once.
        device_bytes: of all its ranks.
        needed_bytes: of the device that needs most.
        kv_cache_bytes: of all its ranks, for one sequence on each group of ranks.
        kv_cache_tokens: that fit on its devices; ``None`` without a size of memory or a KV cache.
        wire: an estimate of what it sends to other hosts for one token of a sequence.

    """

    host: int
    ranks: range
    stages: tuple[int, ...]
    bytes_read: int
    bytes_read_together: int
    device_bytes: int
    needed_bytes: int
    kv_cache_bytes: int
    kv_cache_tokens: int | None
    wire: Wire

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return vars(self) | {"ranks": [*self.ranks], "wire": self.wire._asdict()}


def plan_hosts(stages: Sequence[ModelPlan], nodes: int) -> list[HostPlan]:
    """Return the plan of each of ``nodes`` hosts, to which ranks go in order, as torchrun does it.

    ``stages`` are the plans of all pipeline stages. Raises ``WeightLoadError`` if the checkpoint
    would be refused, or is a sharded state.
    """
    per_stage = len(stages[0].ranks)
    per_host = len(stages) * per_stage // nodes
    # By number in the engine, whose rank 0 is of the last stage.
    ranks = [(plan, rank) for plan in reversed(stages) for rank in plan.ranks]
    held = bytes_by_holders(layout_of_stages([plan.layout for plan in reversed(stages)]))
    # What ranks of several stages hold, such as tied embeddings, each stage reads.
    apart = [0] * (len(ranks) // per_stage)
    own = [0] * len(ranks)
    for holders, nbytes in held.items():
        for stage in {rank // per_stage for rank in holders}:
            of_stage = [rank for rank in holders if rank // per_stage == stage]
            if len(of_stage) == 1:
                own[of_stage[0]] += nbytes
            else:
                apart[stage] += nbytes
    wire = _wire(stages, per_host)
    hosts = []
    for host in range(nodes):
        here = range(host * per_host, (host + 1) * per_host)
        plans = [ranks[number] for number in here]
        shared = sum(apart[rank // per_stage] / per_stage for rank in here)
        hosts.append(
            HostPlan(
                host,
                here,
                tuple(dict.fromkeys(plan.stage[0] for plan, _ in plans)),
                sum(nbytes for holders, nbytes in held.items() if not holders.isdisjoint(here)),
                round(shared + sum(own[rank] for rank in here)),
                sum(rank.device_bytes for _, rank in plans),
                max(rank.needed_bytes(plan.tokens) for plan, rank in plans),
                sum(rank.kv_cache_bytes(plan.tokens) for plan, rank in plans),
                _tokens(plans),
                wire[host],
            )
        )
    return hosts


def _tokens(plans: Sequence[tuple[ModelPlan, RankPlan]]) -> int | None:
    """Return the tokens whose keys and values fit on the ranks of a host.

    Each group of tensor-parallel ranks has sequences of its own. A token takes memory on each of
    the group's ranks, and in each stage.
    """
    fit: dict[int, dict[int, int]] = {}  # by stage and group: of the rank with the least
    for plan, rank in plans:
        if plan.memory_bytes is None or not rank.kv_page_bytes:
            continue
        groups, group = fit.setdefault(plan.stage[0], {}), rank.rank // plan.tp_size
        tokens = rank.kv_cache_tokens(plan.memory_bytes)
        groups[group] = min(tokens, groups.get(group, tokens))
    return min((sum(groups.values()) for groups in fit.values()), default=None)


def _wire(stages: Sequence[ModelPlan], per_host: int) -> list[Wire]:
    """Return what each host sends to others for one token, estimated.

    Sequences are spread evenly over the groups of tensor-parallel ranks of a stage, so each group
    counts with its share. A ring goes through ranks in order, so each host that has some of its
    ranks, and not all, sends over one link. Each rank of a stage sends its number in the next one
    the hidden states. Rank 0's message of each step, at least 32 KiB to each rank, is not counted.
    """
    per_stage, tp_size = len(stages[0].ranks), stages[0].tp_size
    groups = per_stage // tp_size
    sent = [Wire()] * (len(stages) * per_stage // per_host)

    def ring(ranks: range, each: Wire) -> None:
        hosts = {rank // per_host for rank in ranks}
        for host in hosts if len(hosts) > 1 else ():
            sent[host] = sent[host].plus(each)

    for place, plan in enumerate(reversed(stages)):
        messages, first = plan.ranks[0].messages, place * per_stage
        for begin in range(first, first + per_stage, tp_size):
            share = messages.layers(tp_size) / groups
            ring(range(begin, begin + tp_size), Wire(layers=share))
        ring(
            range(first, first + per_stage),
            Wire(experts=messages.experts(per_stage, tp_size)),
        )
        for rank in range(first, first + per_stage) if place else ():  # all but the last stage
            host, receiver = rank // per_host, (rank - per_stage) // per_host
            if host != receiver:
                sent[host] = sent[host].plus(Wire(stages=messages.passed / groups))
    return sent


def print_hosts(out: Console, stages: Sequence[ModelPlan], hosts: Sequence[HostPlan]) -> None:
    """Print a table of all hosts, those that are alike in one column."""
    print_columns(out, "hosts", host_columns(stages, hosts))
    print_text(out, "~ is estimated: rings of ranks in order, without the messages of a step")


def host_columns(
    stages: Sequence[ModelPlan], hosts: Sequence[HostPlan]
) -> list[tuple[str, dict[str, str]]]:
    """Return for each kind of hosts a title, and what a table shows by the labels of its lines."""
    plan = stages[0]
    alike: dict[tuple[tuple[str, str], ...], list[HostPlan]] = {}
    for host in hosts:
        lines = {"stages": rank_list(host.stages)} if len(stages) > 1 else {}
        lines["read, each byte once a host"] = size(host.bytes_read)
        lines["read, each byte once by the ranks of a stage"] = size(host.bytes_read_together)
        lines["weights and buffers of all its ranks"] = size(host.device_bytes)
        lines["memory of a device, at the peak"] = size(host.needed_bytes)
        if any(each.kv_cache_bytes for each in hosts):
            label = f"KV cache of {plan.tokens:,} tokens, on all its ranks"
            lines[label] = size(host.kv_cache_bytes)
        if host.kv_cache_tokens is not None:
            lines["tokens of KV cache that fit"] = f"{host.kv_cache_tokens:,}"
        sent = zip(("layers", "experts", "stages"), host.wire, strict=True)
        for what, nbytes in sent:
            if any(getattr(each.wire, what) for each in hosts):
                lines[f"sent to other hosts for a token, for {what}"] = f"~{size(nbytes)}"
        alike.setdefault(tuple(lines.items()), []).append(host)
    which = partial(_title, count=len(hosts))
    return [(which(members), dict(lines)) for lines, members in alike.items()]


def _title(hosts: Sequence[HostPlan], count: int) -> str:
    if len(hosts) == count > 1:
        return "each host"
    numbers = rank_list([each.host for each in hosts])
    ranks = rank_list([rank for each in hosts for rank in each.ranks])
    return f"host{'s' if len(hosts) > 1 else ''} {numbers} (ranks {ranks})"

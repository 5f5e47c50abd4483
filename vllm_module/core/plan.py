"""The plan of a load: the tensors and pieces that it reads, and the memory that it takes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from vllm_module.base.summary import Summarized, mebibytes
from vllm_module.core.fill import Fill
from vllm_module.core.report import LoadReport
from vllm_module.core.tensors import is_typed, kind_of
from vllm_module.core.tree import LoadState, Location, Node, modules_below, state_of
from vllm_module.parameters import Reordered
from vllm_module.weights import PIECE_BYTES, Weight, reader_threads, staging_buffers
from vllm_module.weights.handle import FileHandle

if TYPE_CHECKING:
    from vllm_module.layout import Layout


class Read(NamedTuple):
    """One piece of a checkpoint tensor that this rank reads, and the slot it is for."""

    name: str
    parameter: str
    slot: str | None
    source: Weight

    @property
    def nbytes(self) -> int:
        """Bytes of the piece, as the checkpoint stores it."""
        return self.source.shape.numel() * self.source.dtype.itemsize


class FileRange(NamedTuple):
    """Bytes of a checkpoint's file, from ``begin`` to before ``end``."""

    file: Path
    begin: int
    end: int


class PlannedMemory(NamedTuple):
    """The most memory that a load takes on this rank, in bytes.

    Attributes:
        model: on the device, for all parameters and buffers; a tied tensor counts once.
        staging: in host memory, for what is read there before it is copied or converted.
        quantizing: on the device, beside the model, for full precision that is being quantized. On
            a GPU, what is cast or put in order there counts too.

    """

    model: int
    staging: int
    quantizing: int


@dataclass(frozen=True, repr=False)
class LoadPlan(Summarized):
    """What ``module.load_weights`` does with some weights, before anything is read.

    Attributes:
        module: the module that made the plan, or a copy of it that has another rank's parameters.
        report: what would happen to every name.
        fills: the checkpoint tensors that would be read, each with the slot that it fills, in the
            order of reading.
        folder: of the checkpoint, if it is known; for messages.
        zeros: tensors that are skipped if they hold zeros, and were not looked at.

    """

    module: nn.Module
    report: LoadReport
    fills: list[Fill]
    folder: Path | None = None
    zeros: Sequence[tuple[str, Weight]] = ()

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines of the table."""
        memory, report = self.memory(), self.report
        problems = ("missing", "unexpected", "duplicated", "misshapen")
        counts = {kind: len(getattr(report, kind)) for kind in ("skipped", *problems)}
        reads = list(self.reads())
        size = mebibytes(sum(read.nbytes for read in reads))
        return [
            ("model", type(self.module).__name__),
            ("reads", f"{len(reads)} parts of {len(self.fills)} tensors, {size}"),
            ("memory of the model", mebibytes(memory.model)),
            ("beside it while loading", mebibytes(memory.staging + memory.quantizing)),
            *((kind, str(count)) for kind, count in counts.items() if count),
        ]

    def of_rank(self, rank: int) -> LoadPlan:
        """Return the plan of another rank, found from the dimensions of this rank's parameters.

        ``rank`` counts all ranks of the model. Names are not routed again: every rank takes the
        same ones, and cuts them for itself. The plan's module is for planning only.
        """
        return self._copied(lambda tensor: tensor.of_rank(rank) if is_typed(tensor) else tensor)

    def again(self, weights: Mapping[str, Weight]) -> LoadPlan:
        """Return the plan of a load of other weights into a new module that is like this plan's.

        They have the names, shapes and dtypes that the plan was made for, and nothing is routed
        again. This plan's module is still on meta, and no buffers of it are computed from weights.
        """
        plan = self._copied(lambda tensor: tensor, weights)
        for module in modules_below(plan.module):
            # A copy has what the other one has, until it is replaced; setattr would take time.
            own = module.__dict__
            own["_buffers"], own["_forward_pre_hooks"] = {**own["_buffers"]}, OrderedDict()
            if "load_state" in own:
                own["load_state"] = LoadState(state_of(module).device)
        unexpected, misshapen = [*self.report.unexpected], [*self.report.misshapen]  # a run adds
        return replace(
            plan,
            report=replace(self.report, unexpected=unexpected, misshapen=misshapen),
            zeros=[(name, weights.get(name, weight)) for name, weight in self.zeros],
        )

    def _copied(
        self, change: Callable[[Any], torch.Tensor], weights: Mapping[str, Weight] | None = None
    ) -> LoadPlan:
        """Return the same plan for a copy of the module, with other parameters, and weights."""
        weights = weights or {}
        tensors: dict[torch.Tensor, torch.Tensor] = {}
        modules: dict[nn.Module, nn.Module] = {}
        nodes: dict[Node, Node] = {}
        locations: dict[Location, Location] = {}
        module = _copy_of_module(self.module, change, modules, tensors)
        fills = []
        for each in self.fills:
            location = locations.get(each.location)
            if location is None:
                node = _copy_of_node(each.location.node, modules, nodes)
                location = locations[each.location] = Location(node, each.location.attr)
            name, slot, weight, _, tied_to, held = each
            fills.append(Fill(name, slot, weights.get(name, weight), location, tied_to, held))
        return LoadPlan(module, self.report, fills, self.folder)

    def alike(self) -> list[list[Fill]]:
        """Return the fills in groups: each rank keeps the same part of all tensors of one."""
        groups: dict[Hashable, list[Fill]] = {}
        kinds: dict[Location, Hashable] = {}
        for each in self.fills:
            weight, location = each.weight, each.location
            kind = kinds.get(location)
            if kind is None:
                kind = kinds[location] = _kind(location)
            key = kind, each.slot, weight.shape, weight.dtype, type(weight)
            groups.setdefault(key, []).append(each)
        return list(groups.values())

    def layout(self, ranks: int | None = None) -> Layout:
        """Return which box of each tensor lies where on each of ``ranks`` ranks.

        By default there are as many ranks as the model is built for. Raises ``WeightLoadError`` if
        a load would be refused, and where a layout cannot tell what is read: for a sharded state,
        and for tensors that an override has cut in memory.
        """
        from vllm_module.core.layout_of import layout_of_fills  # its classes take time to import

        self.report.raise_if_refused(type(self.module).__name__, touched=False, folder=self.folder)
        return layout_of_fills(self.module, self.fills, self.report, ranks)

    def reads(self) -> Iterator[Read]:
        """Yield every piece that this rank would read, its handle narrowed to what is kept."""
        for each in self.fills:
            for piece in each.pieces():
                yield Read(each.name, each.location.path, each.slot, piece.source)

    def ranges(self, rank: int | None = None, gap: int | None = None) -> list[FileRange]:
        """Return the bytes of files that a rank reads, in the order of reading.

        By default the rank is the plan's own, and the ranges are those that our own reader asks
        for: whole OS pages, and small gaps between them. With a ``gap``, they are the bytes that
        are kept, and what is between two ranges if it is at most so many bytes. Tensors that are
        in no file have none.
        """
        plan = self if rank is None else self.of_rank(rank)
        found: list[FileRange] = []
        for fill in plan.fills:
            if not isinstance(fill.weight, FileHandle):
                continue
            for piece in fill.pieces():
                source = cast(FileHandle, piece.source)
                for run in source.runs():
                    ends = run.pages() if gap is None else run.segments(gap)
                    for begin, end in ends:
                        before = found[-1] if found else None
                        follows = (
                            before is not None
                            and before.file == source.file
                            and before.begin <= begin <= before.end + (gap or 0)
                        )
                        if follows and before is not None:
                            found[-1] = before._replace(end=max(end, before.end))
                        else:
                            found.append(FileRange(source.file, begin, end))
        return found

    def memory(
        self, device: torch.device | str = "cpu", counts: Sequence[int] | None = None
    ) -> PlannedMemory:
        """Return the most memory that the load takes where parameters are on ``device``.

        Each reading thread holds one piece at a time. A piece of a handle is read directly into a
        parameter in host memory that has its dtype, and takes no other memory then. Onto another
        device it is read through pinned buffers of ``PIECE_BYTES``. ``counts`` tells for how many
        tensors that are :meth:`alike` each fill stands; for 1 unless given.
        """
        device = torch.device(device)
        on_cpu, threads = device.type == "cpu", reader_threads(device)
        pieces = 0
        staged: list[int] = []
        converted: list[int] = []
        for each, count in zip(self.fills, counts or repeat(1), strict=False):
            for source, target in each.jobs():
                nbytes = source.shape.numel() * source.dtype.itemsize
                memory = target if isinstance(target, torch.Tensor) else None
                pieces += count * max(1, -(-nbytes // PIECE_BYTES))
                if memory is not None:
                    if source.dtype == memory.dtype and memory.is_contiguous():
                        continue
                    nbytes = min(nbytes, PIECE_BYTES)
                on_host = on_cpu and (memory is not None or isinstance(target, Reordered))
                (staged if on_host else converted).extend([nbytes] * min(count, threads))
        tensors = (*self.module.parameters(), *self.module.buffers())
        model = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        staging, converting = (sum(heapq.nlargest(threads, sizes)) for sizes in (staged, converted))
        if not on_cpu:
            staging = min(pieces, staging_buffers(threads)) * PIECE_BYTES
        return PlannedMemory(model, staging, converting)


def in_reading_order(fills: Iterable[Fill]) -> list[Fill]:
    """Return fills in the order in which they are read: one tensor after the other.

    The tensors of a module that processes its weights as soon as it has them are together, so that
    it does so before the next one takes memory.
    """
    of_tensor: dict[Location, list[Fill]] = {}
    for fill in fills:
        of_tensor.setdefault(fill.location, []).append(fill)
    groups: dict[nn.Module | None, list[Fill]] = {}  # a module may have two nodes
    for location, filling in of_tensor.items():
        owner = location.node.owner
        groups.setdefault(owner.module if owner.processes_alone else None, []).extend(filling)
    return [fill for group in groups.values() for fill in group]


def _kind(location: Location) -> Hashable:
    """Return what the pieces of a tensor, and the memory to read them, depend on."""
    kind, conversion = kind_of(location.tensor), location.conversion
    if conversion is None:
        return kind
    beside = location.node.module._parameters.values()  # a conversion may fill others too
    return kind, id(conversion), *(kind_of(each) for each in beside if each is not None)


def _copy_of_module(
    module: nn.Module,
    change: Callable[[Any], torch.Tensor],
    modules: dict[nn.Module, nn.Module],
    tensors: dict[torch.Tensor, torch.Tensor],
) -> nn.Module:
    """Return a copy of the tree with changed parameters; what is shared stays shared."""
    if module in modules:
        return modules[module]
    other = modules[module] = object.__new__(type(module))
    for tensor in module._parameters.values():
        if tensor is not None and tensor not in tensors:
            tensors[tensor] = change(tensor)
    children = {
        name: child if child is None else _copy_of_module(child, change, modules, tensors)
        for name, child in module._modules.items()
    }
    own = {name: t if t is None else tensors[t] for name, t in module._parameters.items()}
    other.__dict__.update(module.__dict__, _parameters=own, _modules=children)
    computed: Any = getattr(other, "computed_buffers", None)  # of a quantized layer
    if computed is not None:
        other.__dict__["_buffers"] = {**module._buffers, **computed()}
    return other


def _copy_of_node(node: Node, modules: dict[nn.Module, nn.Module], nodes: dict[Node, Node]) -> Node:
    """Return the place of the copied module."""
    other = nodes.get(node)
    if other is None:
        parent, name = None, ""
        if node.parent is not None:
            parent = _copy_of_node(node.parent, modules, nodes)
            name = node.path[len(parent.path) : -1]
        other = nodes[node] = Node(modules[node.module], parent, name)
        other.conversions = node.conversions  # none where tensors are loaded as they are held
    return other

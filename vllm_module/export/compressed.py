"""Writing a quantized checkpoint: an online load's weights, under the original's names.

Layers are loaded one after another, as the model itself would load them, written and freed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import LoadReport
from vllm_module.core.tensors import slots_of
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.export import compressed_config
from vllm_module.export.compressed_config import quantization_config, stored_as
from vllm_module.export.folder import copy_small_files, new_folder, write_json
from vllm_module.export.units import (
    FILE_BYTES,
    CopiedTensor,
    WrittenUnit,
    entries_to_write,
    opened,
    skipped_names,
    write_units,
)
from vllm_module.parameters import BasevLLMParameter, StoredOrder
from vllm_module.quantization import QuantizableLayer, Scheme
from vllm_module.quantization.packed import COMPRESSED_TENSORS, PackedMethod
from vllm_module.weights import Weight
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored

_WEIGHT = ".weight"
# Where files of text and images have names of transformers 4, the path of the module in version 5.
_MOVED = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
}


class Converted(NamedTuple):
    """The result of :func:`convert`.

    Attributes:
        report: report of the original's load; skipped names are copied.
        quantized: names of the layers that are quantized.
        read, written: bytes of tensors.

    """

    report: LoadReport
    quantized: tuple[str, ...]
    read: int
    written: int


def convert(
    config: ModelConfig,
    out: str | Path,
    *,
    load_format: str = "auto",
    file_bytes: int = FILE_BYTES,
    on_tensors: Callable[[int], object] = lambda nbytes: None,
) -> Converted:
    """Quantize a checkpoint by ``config.quantization`` and write it in compressed-tensors' layout.

    On one rank, loading the folder ``out`` gives the bits of an online load of the original. On
    several ranks it does so for scales that cover one rank's part; other scales are those of whole
    tensors. Tensors that are not quantized are copied as they are stored. Host memory holds one
    layer. ``on_tensors`` is called with the bytes of tensors written so far.

    Raises:
        ValueError: ``out`` exists and is no empty folder, or no quantization is requested.
        UnsupportedModelError: the checkpoint is already quantized; or a layer's tensors are stored
            in a way that the layout lacks.
        WeightLoadError: the checkpoint is refused.

    """
    if config.quantization is None:
        raise ValueError("quantization should name a scheme to convert to, got None")
    source = ModelSource.find(config, load_format)
    with opened(source, "convert") as checkpoint:
        model = source.build(torch.device("cpu"), len(checkpoint))
        _demand_layouts(model)
        plan = model.plan_weights(checkpoint)
        plan.report.raise_if_refused(type(model).__name__, touched=False, folder=source.folder)
        units = list(_units(plan))
        quantized = [each for each in units if isinstance(each, _Layer)]
        layers = {name: each.stored_as for each in quantized for name in each.names}
        if not layers:
            raise UnsupportedModelError(
                f"no layer of {type(model).__name__} is quantized by these settings"
            )
        skipped = [CopiedTensor(name, checkpoint[name]) for name in skipped_names(plan, checkpoint)]
        ignored = _with_modules(_ignored(model, plan) | _layers(skipped))
        units += skipped
        with new_folder(Path(os.path.expanduser(out))) as folder:
            copy_small_files(source.folder, folder)
            entries = entries_to_write(source, config)
            whole = all(each.whole_blocks for each in quantized)
            described = quantization_config(layers, ignored, whole_blocks=whole)
            entries["quantization_config"] = described
            write_json(folder / "config.json", entries)
            written = write_units(folder, units, file_bytes, on_tensors)
        return Converted(plan.report, tuple(layers), checkpoint.bytes_read, written)


class _Layer(NamedTuple):
    """A layer that is quantized while it is loaded.

    Attributes:
        path: path of the layer.
        stored_as: the QuantizeMethod that will read this layer from the new checkpoint.
        pairs: tensors that the layer is loaded from, with names relative to it.
        names: the checkpoint's name of each slot.

    """

    path: str
    layer: QuantizableLayer
    stored_as: compressed_config.Stored
    pairs: list[tuple[str, Weight]]
    names: dict[str, str]

    @property
    def whole_blocks(self) -> bool:
        """Whether the inputs are whole blocks, if the weight has blocks."""
        method = self.stored_as
        if not isinstance(method, Scheme) or method.strategy != "block":
            return True
        return self.layer.input.size % method.block[1] == 0

    @property
    def tensors(self) -> dict[str, Stored]:
        return {
            f"{name}.{attr}": Stored(parameter.dtype, tuple(parameter.checkpoint_shape(slot)))
            for attr, parameter in self._parameters().items()
            for name, slot in self.names.items()
        }

    def _parameters(self) -> dict[str, BasevLLMParameter]:
        """Return parameters such as the layer would have after loading the new checkpoint."""
        if isinstance(self.stored_as, PackedMethod):
            return self.stored_as.create_weights(self.layer)
        layer = self.layer
        return {n: layer.typed_parameter(n, BasevLLMParameter) for n in layer.parameter_names}

    def write(self, file: SafetensorsWriter) -> None:
        try:
            self.layer.load_weights(self.pairs)
        except WeightLoadError as error:
            error.args = (f"{self.path}.{error}",)
            raise
        parameters = self._parameters()
        if isinstance(self.stored_as, PackedMethod):
            parameters = _packed(self.layer, parameters)
        for attr, parameter in parameters.items():
            for name, slot in self.names.items():
                file.write(f"{name}.{attr}", _as_stored(parameter, slot))
        self.layer.sleep()


def _packed(
    layer: QuantizableLayer, parameters: dict[str, BasevLLMParameter]
) -> dict[str, BasevLLMParameter]:
    """Return compressed-tensors' packed parameters, with the values of an online layer."""
    names = COMPRESSED_TENSORS
    held = {attr: parameter.materialize_on("cpu") for attr, parameter in parameters.items()}
    with torch.no_grad():
        held[names.words].copy_(layer.weight)
        held[names.scales].copy_(layer.get_parameter("weight_scale"))
        for slot in (shapes := held[names.shape]).slots:
            rows, inputs = layer.weight.checkpoint_shape(slot)[-2:]
            shapes.region(slot).copy_(torch.tensor([rows, inputs]))
    return held


def _units(plan: LoadPlan) -> Iterator[WrittenUnit]:
    """Yield the units to write, in the order of the plan's fills."""
    of_module: dict[nn.Module, list[Fill]] = {}
    for each in plan.fills:
        of_module.setdefault(each.location.node.module, []).append(each)
    for each in plan.fills:
        if each.location.conversion is None:
            yield CopiedTensor(each.name, each.weight)
        elif fills := of_module.pop(each.location.node.module, None):  # the first fill of a layer
            yield _layer(fills)


def _layer(fills: Sequence[Fill]) -> _Layer:
    """Return the unit of one layer; raise if the layout cannot describe it."""
    location = fills[0].location
    path, layer = location.node.path[:-1], location.node.module
    assert isinstance(layer, QuantizableLayer)
    stored = stored_as(path, layer.quant_method)
    pairs: list[tuple[str, Weight]] = []
    names: dict[str, str] = {}
    for each in fills:
        attr = each.location.attr
        pairs.append((f"{each.slot}.{attr}" if each.slot else attr, each.weight))
        if each.location.conversion is not None:
            names |= _names(each)
    one_scale = isinstance(stored, Scheme) and stored.strategy == "tensor"
    problem = None
    if layer.transposed:
        problem = "stores its weight as [input, output]"
    elif "" in names.values() and layer.experts is not None:
        problem = "stores the weights of all experts as one tensor, and none of a single one"
    elif "" in names.values() and one_scale and len(layer.output.slots) > 1:
        problem = f"stores {len(layer.output.slots)} fused layers as one tensor with one scale each"
    if problem is not None:
        raise UnsupportedModelError(
            f"the checkpoint of {path} {problem}, which compressed-tensors has no layout for: "
            "leave the layer out (ignore), or take another scheme"
        )
    return _Layer(path, layer, stored, pairs, names)


def _names(fill: Fill) -> dict[str, str]:
    """Return the slots that ``fill`` fills, by their names in a checkpoint.

    A tensor of several slots is split, because each may have scales of its own.
    """
    name, slot, location = fill.name, fill.slot, fill.location
    slots = slots_of(location.tensor)
    if name.endswith(_WEIGHT) and (slot is not None or len(slots) == 1):
        return {name.removesuffix(_WEIGHT): slot or next(iter(slots))}
    chosen = slots if slot is None else (slot,)
    return {location.stored_name(each).removesuffix(_WEIGHT): each for each in chosen}


def _as_stored(parameter: BasevLLMParameter, slot: str) -> torch.Tensor:
    """Return a slot in the form that a checkpoint stores; this rank holds all of it."""
    stored = torch.empty(parameter.checkpoint_shape(slot), dtype=parameter.dtype)
    for piece in parameter.pieces(stored, slot):
        source = piece.source
        assert isinstance(source, torch.Tensor)
        held = piece.target if piece.order is None else _undone(piece.order, piece.target)
        source.copy_(held)
    return stored


def _undone(order: StoredOrder, held: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``order`` restores to ``held``, which has no padding."""
    assert not order.transposed
    parts: list[tuple[int, StoredOrder]] = []
    if order.groups is not None:
        parts.append((order.groups[0], StoredOrder(groups=(0, *order.groups[1:]))))
    if order.pairs is not None:
        parts.append((order.pairs[0], StoredOrder(pairs=(0, order.pairs[1]))))
    for dim, along in parts:
        # Viewed as bytes, because some eight-bit dtypes have no operation to move rows.
        moved = held.movedim(dim, 0).contiguous()
        rows = moved.view(torch.uint8)
        places = along.restore(torch.arange(len(rows)))
        assert len(places) == len(rows)
        undone = torch.empty_like(rows)
        undone[places] = rows
        held = undone.view(moved.dtype).movedim(0, dim)
    return held


def _ignored(model: vLLMModule, plan: LoadPlan) -> set[str]:
    """Return the checkpoint's names of layers that are not quantized, with tied heads."""
    ignored = {
        name
        for each in plan.fills
        if each.location.attr == "weight" and each.location.conversion is None
        if each.location.tensor.dim() > 1
        for name in _names(each)
    }
    plain = (
        path
        for path, module in model.named_modules()
        if isinstance(module, QuantizableLayer) and not module.is_quantized
    )
    assigned = {each.location.node.path[:-1] for each in plan.fills}
    return ignored | {path for path in plain if path not in assigned}


def _layers(copied: Iterable[CopiedTensor]) -> set[str]:
    """Return the checkpoint's names of layers that other libraries may have, and this model not."""
    weights = (
        each for each in copied if each.name.endswith(_WEIGHT) and len(each.weight.shape) > 1
    )
    return {each.name.removesuffix(_WEIGHT) for each in weights}


def _with_modules(names: set[str]) -> set[str]:
    """Return the names, and those of transformers 5's modules where a file has older ones."""
    moved = {
        new + name.removeprefix(old)
        for name in names
        for old, new in _MOVED.items()
        if name.startswith(old)
    }
    return names | moved


def _demand_layouts(model: vLLMModule) -> None:
    """Raise for a module whose tensors cannot be written, whatever the checkpoint has."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizableLayer) and module.is_embedding and module.is_quantized:
            raise UnsupportedModelError(
                f"{path} is an embedding, and readers of compressed-tensors take only linear "
                "layers quantized: leave it, and a head that is tied to it, out of overrides"
            )
        if isinstance(module, vLLMModule) and module.overrides_load_weights:
            kind = type(module).__name__
            owner = f"{path} ({kind})" if path else kind
            raise UnsupportedModelError(
                f"{owner} overrides load_weights, so its checkpoint has other names or values than "
                "its parameters, and cannot be written again"
            )

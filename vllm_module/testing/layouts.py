"""The law of layouts: every element of a checkpoint is held where the layout says, once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_module.core.digests import ModelDigest, digest_of
from vllm_module.core.module import vLLMModule
from vllm_module.layout import Layout, parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.testing.case import Case, law
from vllm_module.testing.checkpoints import CheckpointForm, Tensors, same_bits, state
from vllm_module.weights.digests import digest_weight
from vllm_module.weights.region import Region


@law
def assert_laid_out(case: Case) -> None:
    """Law 11: a layout says, without the model, what every rank holds, and a digest proves it.

    The layout is read back from JSON, which refuses boxes that overlap or leave something out. By
    its boxes alone the checkpoint is cut for each rank, and the result is what the rank has loaded,
    bit for bit, zeros of padding included. What a conversion makes is not compared. The ranks'
    digests add up to those of the checkpoint's tensors, quantized ones included, and of one rank.
    The checkpoint has any form, in which layers may be fused.
    """
    size = case.size
    tensors = CheckpointForm.choose(case.whole, case.random).of(case.tensors)
    regions = {name: Region.of(name, tensor) for name, tensor in tensors.items()}
    layout = case.build(0, size).plan_weights(regions).layout(size)
    data = layout_json(layout)
    assert parse_layout(data) == layout, "the layout differs after it was written and read"
    written = json.loads(data)
    _assert_owners(case, layout)

    _assert_digests(case, layout, tensors)
    assert_held_as_written(written, tensors, case.on_every_rank(partial(load_unprocessed, tensors)))


def load_unprocessed(tensors: Tensors, module: vLLMModule) -> Tensors:
    """Load the module; return its state before processing, eight-bit floats as integers."""
    return {
        path: tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        for path, tensor in _before_processing(module, tensors).items()
    }


def assert_held_as_written(
    written: dict[str, Any], tensors: Tensors, held_by_rank: Sequence[Tensors]
) -> None:
    """Compare what ranks hold with what a layout as JSON says, bit by bit."""
    size = len(held_by_rank)
    for rank, held in enumerate(held_by_rank):
        for path, expected in cut_by(written, tensors, rank).items():
            got = held[path].view(expected.dtype)
            assert got.shape == expected.shape, (
                f"rank {rank} of {size}: {path} has shape {list(got.shape)}, and "
                f"{list(expected.shape)} in the layout"
            )
            assert same_bits(got, expected), (
                f"rank {rank} of {size}: {path} differs from what the layout says"
            )


def digest_by(layout: Layout, tensors: Tensors, module: vLLMModule) -> ModelDigest:
    """Load the module, and return the digest of what the layout says that it holds."""
    module.keep_digests = True
    _before_processing(module, tensors)
    return digest_of(module, layout)


def assert_add_up(digests: Iterable[ModelDigest], layout: Layout, tensors: Tensors) -> None:
    """Add up the ranks' digests, and compare them with those of the whole tensors."""
    together = sum(digests, start=ModelDigest())
    got = {
        name: sum(others, start=first)
        for name, (first, *others) in ((n, list(b.values())) for n, b in together.boxes.items())
    }
    for name, _, _ in layout.names():
        expected = digest_weight(tensors[name])
        assert got[name] == expected, f"{name}: the ranks' digests are not the tensor's"
    assert len(got) == len(list(layout.names()))


def _assert_digests(case: Case, layout: Layout, tensors: Tensors) -> None:
    """Compare the ranks' digests with those of the whole tensors, and of one rank."""
    assert_add_up(case.on_every_rank(partial(digest_by, layout, tensors)), layout, tensors)
    if any(each.conversion not in (None, "exponents") for each in layout.partitions):
        return  # scales may depend on the cut
    whole = case.build()
    _before_processing(whole, tensors)
    own = case.on_every_rank(lambda module: _own_digest(module, tensors))
    assert digest_of(whole) == sum(own, start=ModelDigest()), (
        "the digest of a model changes with the number of ranks"
    )


def _own_digest(module: vLLMModule, tensors: Tensors) -> ModelDigest:
    _before_processing(module, tensors)
    return digest_of(module)


def _before_processing(module: vLLMModule, tensors: Tensors) -> Tensors:
    """Load the module, and return its state as it was before any weights were processed."""
    for each in module.modules():
        if isinstance(each, vLLMModule):
            each.__dict__["processing"] = lambda: ()
    module.load_weights(tensors)
    return state(module)


def _assert_owners(case: Case, layout: Layout) -> None:
    """Compare the owners of some elements with the boxes that hold them."""
    names = list(layout.names())
    for name, entry, expert in case.some(names, "names", least=0, most=3):
        numel = math.prod(entry.shape)
        if not numel:
            continue
        numbers = torch.arange(numel)
        element = case.random.randrange(numel)
        index = [int(at) for at in (numbers.view(entry.shape) == element).nonzero()[0]]
        expected = [
            rank
            for ranks, box in layout.held_by(entry, expert)
            if bool((boxed(numbers, entry.shape, box.view, box.start, box.size) == element).any())
            for rank in ranks
        ]
        owners = [owner.rank for owner in layout.owners(name, index)]
        assert owners == sorted(expected), f"{name}: ranks {owners} own element {index}"


def boxed(stored: torch.Tensor, shape: Any, view: Any, start: Any, size: Any) -> torch.Tensor:
    """Return a box of a tensor, which counts in ``view``."""
    viewed = stored.reshape(view or shape)
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        viewed = viewed.narrow(dim, first, count)
    return viewed


def cut_by(layout: dict[str, Any], tensors: Tensors, rank: int) -> Tensors:
    """Return the parameters of a rank, cut by a layout as JSON has it; converted ones are left out.

    Nothing but the layout and the tensors is needed. What the layer fills in by itself, for a
    checkpoint that lacks it, is left out too.
    """
    parameters, unknown = {}, {entry["parameter"] for entry in layout.get("absent", ())}
    for path, parameter in layout["parameters"].items():
        for ranks, shape in layout["shapes"][parameter["shapes"]]:
            if rank in ranks:
                parameters[path] = torch.zeros(shape, dtype=getattr(torch, parameter["dtype"]))
    for entry in layout["tensors"]:
        cut, path = layout["partitions"][entry["partition"]], entry["parameter"]
        if cut.get("conversion") not in (None, "exponents"):
            unknown |= {path, *_made(cut, path)}
            continue
        first, count = entry.get("experts", (0, 1))
        for expert in range(first, first + count):
            stored = tensors[entry["name"].replace("{expert}", str(expert))]
            if "conversion" in cut and stored.element_size() == 1:
                stored = stored.view(torch.float8_e8m0fnu).float()
            for held in cut["held"]:
                begin, number = held.get("experts", (expert, 1))
                if rank not in held["ranks"] or not 0 <= expert - begin < number:
                    continue
                for box in held["boxes"]:
                    part = boxed(stored, entry["shape"], box.get("view"), box["start"], box["size"])
                    place = box["held"]
                    offset = place["offset"] + (expert - begin) * place.get("step", 0)
                    region = parameters[path].as_strided(place["shape"], place["strides"], offset)
                    one = part.numel() == 1
                    region.copy_(part.reshape(() if one else place["shape"]))
    return {path: tensor for path, tensor in parameters.items() if path not in unknown}


def _made(cut: dict[str, Any], path: str) -> list[str]:
    prefix = path.rpartition(".")[0]
    made = {each["attr"] for held in cut["held"] for box in held["boxes"] for each in box["made"]}
    return [f"{prefix}.{attr}".lstrip(".") for attr in made]

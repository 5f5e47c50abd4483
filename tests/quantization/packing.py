"""Layers in packed layouts, and what they stand for.

No installed library writes GPTQ's and AWQ's layouts, so they are written from their formulas: a
stream of bits in Python's integers, cut into words. compressed-tensors writes its own. Nothing here
is the package's.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import (
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

publishing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("publishing.py"))))

Tensors = dict[str, torch.Tensor]

# AutoAWQ: the number of the column that each nibble of a word has, the lowest nibble first.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layer:
    """A quantized layer ``[output, input]`` in a layout, and the weight it stands for.

    Attributes:
        stored: the tensors by their names in a checkpoint, without the layer's.
        weight: ``[output, input]``, ``(code - zero) * scale`` of each element.

    """

    stored: Tensors
    weight: torch.Tensor


def words_of(numbers: list[int], bits: int) -> list[int]:
    """Return a stream of numbers of some bits as words of 32 bits, the first number lowest."""
    stream = sum(number << (bits * place) for place, number in enumerate(numbers))
    words = [(stream >> (32 * at)) & 0xFFFFFFFF for at in range(-(-len(numbers) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the second dimension."""
    return torch.tensor([words_of(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def packed_awq(numbers: torch.Tensor) -> torch.Tensor:
    """Pack four bits along the second dimension, in AutoAWQ's order."""
    rows = []
    for row in numbers.tolist():
        ordered = [row[first + column] for first in range(0, len(row), 8) for column in AWQ_COLUMNS]
        rows.append(words_of(ordered, 4))
    return torch.tensor(rows, dtype=torch.int32)


def drawn(
    rows: int,
    columns: int,
    bits: int,
    group: int | None,
    *,
    symmetric: bool,
    in_order: torch.Tensor | None,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, zeros and scales, the group of each input, and the weight."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group is None else -(-columns // group)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    # GPTQ: a zero is at least 1, or one less of it would have no bits.
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=generator)
    if symmetric:
        zeros.fill_(1 << (bits - 1))
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) * 0.3 / (1 << bits)
    scales = scales.half()
    group_of = torch.arange(columns) // (group or columns) if in_order is None else in_order
    weight = torch.empty(rows, columns, dtype=torch.float64)
    for column in range(columns):
        at = int(group_of[column])
        weight[:, column] = (codes[:, column] - zeros[:, at]).double() * scales[:, at].double()
    return codes, zeros, scales, group_of, weight


def gptq(
    rows: int,
    columns: int,
    bits: int = 4,
    group: int | None = 32,
    *,
    symmetric: bool = False,
    v2: bool = False,
    order: torch.Tensor | None = None,
    seed: int = 0,
) -> Layer:
    """Return a layer as AutoGPTQ stores it, or GPTQModel with ``v2``.

    ``order`` is the group of each input, if they are not in order.
    """
    codes, zeros, scales, group_of, weight = drawn(
        rows, columns, bits, group, symmetric=symmetric, in_order=order, seed=seed
    )
    stored = {
        "qweight": packed_rows(codes, bits).T.contiguous(),
        "qzeros": packed_rows((zeros - (0 if v2 else 1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": group_of.int(),
    }
    return Layer(stored, weight)


def awq(rows: int, columns: int, group: int | None = 32, *, seed: int = 0) -> Layer:
    """Return a layer as AutoAWQ stores it (GEMM)."""
    codes, zeros, scales, _, weight = drawn(
        rows, columns, 4, group, symmetric=False, in_order=None, seed=seed
    )
    stored = {
        "qweight": packed_awq(codes.T),
        "qzeros": packed_awq(zeros.T),
        "scales": scales.T.contiguous(),
    }
    return Layer(stored, weight)


def awq_gemv(rows: int, columns: int, group: int = 32, *, seed: int = 0) -> Layer:
    """Return a layer as AutoAWQ stores it for GEMV: zeros and scales in padded rows of groups."""
    codes, zeros, scales, _, weight = drawn(
        rows, columns, 4, group, symmetric=False, in_order=None, seed=seed
    )
    per_row = {32: 32, 64: 16}.get(group, 8)
    padding = (0, -zeros.shape[1] % per_row)
    stored = {
        "qweight": packed_rows(codes, 4),
        "qzeros": packed_rows(torch.nn.functional.pad(zeros, padding), 4),
        "scales": torch.nn.functional.pad(scales, padding),
    }
    return Layer(stored, weight)


def act_order(columns: int, group: int, seed: int = 0) -> torch.Tensor:
    """Return the group of each input where a permutation gives groups their inputs."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(columns, generator=generator) // group).int()


def by_compressed_tensors(
    weight: torch.Tensor,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    strategy: str | None = None,
    packed: bool = True,
) -> Layer:
    """Return ``weight`` rounded and stored by compressed-tensors, and what it reads from that."""
    strategy = strategy or ("channel" if group is None else "group")
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    least, most = groups.amin(-1), groups.amax(-1)
    if strategy == "tensor":
        least, most = least.amin(), most.amax()
    scale, zero = calculate_qparams(least, most, args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = PackedQuantizationCompressor if packed else IntQuantizationCompressor
    stored = compressor.compress(state, scheme)
    return Layer(stored, compressor.decompress(dict(stored), scheme)["weight"])


def publish(
    folder: Path,
    config: dict[str, Any],
    make: Callable[[str, torch.Tensor], Layer | None],
    quantization: dict[str, Any],
) -> Any:
    """Write a tiny model, with the projections that ``make`` returns a layer for in its layout.

    ``make`` is called with the name and the weight of each linear layer. The logits are those of
    transformers' model with the weights that the layers stand for.
    """
    model = publishing.randomized(config)
    stored, wide = dict(model.state_dict()), dict(model.state_dict())
    if config["tie_word_embeddings"]:
        del stored["lm_head.weight"], wide["lm_head.weight"]
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or f"{name}.weight" not in stored:
            continue
        layer = make(name, module.weight.data)
        if layer is not None:
            wide[f"{name}.weight"] = layer.weight
            del stored[f"{name}.weight"]
            stored |= {f"{name}.{attr}": tensor for attr, tensor in layer.stored.items()}
    model.config.save_pretrained(folder)
    entries = json.loads((folder / "config.json").read_text())
    entries |= {"architectures": [type(model).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(entries))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()},
              folder / "model.safetensors")  # fmt: skip
    logits = publishing.dense_logits(config, wide)
    return publishing.Published(folder, config, publishing.prompt(config["vocab_size"]), logits)

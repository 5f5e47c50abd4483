"""Cases of operations on rows: norms, rotary embedding, gated activations and digests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch.nn import functional as F

from gpu.cases.case import (
    BF16,
    EPS,
    FP16,
    Case,
    Peer,
    Tensors,
    fused_qkv,
    in_float32,
    short,
    writing,
)
from vllm_module.kernels.attention.rotary_embedding import (
    rotary_embedding,
    rotary_embedding_reference,
)
from vllm_module.kernels.digest.boxes import matrices
from vllm_module.kernels.digest.digest import box_sums
from vllm_module.kernels.digest.digest_matrix import digest_matrix_reference
from vllm_module.kernels.rows.act_and_mul import act_and_mul_reference, gelu_and_mul, silu_and_mul
from vllm_module.kernels.rows.rms_norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)


def norms(small: bool) -> Iterator[Case]:
    shapes = [(64, 4096), (8192, 4096)]
    for tokens, hidden in [(5, 96)] if small else shapes:
        for dtype in (BF16, FP16):
            timed = f"rms_norm, {tokens} tokens" if dtype == BF16 else ""
            size = tokens * hidden * dtype.itemsize
            name = f"{tokens} x {hidden} {short(dtype)}"
            yield Case(
                name=f"rms_norm {name}",
                make=partial(norm_inputs, tokens, hidden, dtype, False),
                ours=rms_norm,
                reference=rms_norm_reference,
                truth=in_float32(rms_norm_reference),
                bucket=timed,
                moved=2 * size,
                peers={"F.rms_norm": Peer(lambda x, w, eps: F.rms_norm(x, w.shape, w, eps))},
            )
            yield Case(
                name=f"fused_add_rms_norm {name}",
                make=partial(norm_inputs, tokens, hidden, dtype, True),
                ours=fused_add_rms_norm,
                reference=fused_add_rms_norm_reference,
                truth=in_float32(fused_add_rms_norm_reference),
                bucket=timed,
                moved=4 * size,
            )
    for tokens, dtype in product((5,) if small else (64, 8192), (BF16, FP16)):
        yield Case(
            name=f"rms_norm per head {tokens} x 32 x 128 of qkv {short(dtype)}",
            make=lambda tokens=tokens, dtype=dtype: (
                fused_qkv(tokens, 32, 8, 128, dtype)[0], torch.randn(128, dtype=dtype), EPS
            ),
            ours=rms_norm,
            reference=rms_norm_reference,
            truth=in_float32(rms_norm_reference),
            bucket=f"rms_norm, {tokens} tokens" if dtype == BF16 else "",
            moved=2 * tokens * 32 * 128 * dtype.itemsize,
        )  # fmt: skip


def norm_inputs(tokens: int, hidden: int, dtype: torch.dtype, residual: bool) -> Tensors:
    rows = [torch.randn(tokens, hidden, dtype=dtype) for _ in range(1 + residual)]
    return *rows, 1 + torch.randn(hidden, dtype=dtype) / 4, EPS


def rotary(small: bool) -> Iterator[Case]:
    grid = product((5,) if small else (64, 8192), (BF16, FP16), (True, False), (64, 32))
    for tokens, dtype, neox, pairs in grid:
        timed = dtype == BF16 and pairs == 64
        turned = writing(partial(rotary_embedding, is_neox_style=neox), 0, 1)
        reference = writing(partial(rotary_embedding_reference, is_neox_style=neox), 0, 1)
        yield Case(
            name=f"rotary {'neox' if neox else 'gpt-j'} {tokens} x (32 + 8) x {2 * pairs} of 128 "
            f"{short(dtype)}",
            make=partial(rotary_inputs, tokens, dtype, pairs),
            ours=turned,
            reference=reference,
            truth=in_float32(reference),
            bucket=f"rotary, {tokens} tokens" if timed else "",
            writes=True,
            moved=2 * tokens * 40 * 2 * pairs * dtype.itemsize + 2 * tokens * pairs * 4,
        )


def rotary_inputs(tokens: int, dtype: torch.dtype, pairs: int) -> Tensors:
    angles = torch.rand(tokens, pairs) * 6.28
    return *fused_qkv(tokens, 32, 8, 128, dtype)[:2], angles.cos(), angles.sin()


def activations(small: bool) -> Iterator[Case]:
    for tokens, dtype in product((5,) if small else (64, 8192), (BF16, FP16)):
        columns = 40 if small else 14336
        for name, ours, activation in (
            ("silu", silu_and_mul, "silu"),
            ("gelu", gelu_and_mul, "gelu"),
            ("gelu tanh", partial(gelu_and_mul, approximate="tanh"), "gelu_tanh"),
        ):
            reference = partial(act_and_mul_reference, activation=activation)
            timed = dtype == BF16 and name == "silu"
            yield Case(
                name=f"{name}_and_mul {tokens} x {columns} {short(dtype)}",
                make=lambda tokens=tokens, columns=columns, dtype=dtype: (
                    torch.randn(tokens, 2 * columns, dtype=dtype),
                ),
                ours=ours,
                reference=reference,
                truth=in_float32(reference),
                bucket=f"act_and_mul, {tokens} tokens" if timed else "",
                moved=3 * tokens * columns * dtype.itemsize,
            )


def digests(small: bool) -> Iterator[Case]:
    for rows, columns in [(5, 3000)] if small else [(8192, 8192), (1, 2**26)]:
        for dtype in (BF16, torch.float32, torch.uint8):
            yield Case(
                name=f"digest {rows} x {columns} {short(dtype)}",
                make=partial(digest_inputs, rows, columns, dtype),
                ours=whole_sums,
                reference=plain_sums,
                bucket="digest" if dtype == BF16 and rows > 1 else "",
                moved=rows * columns * dtype.itemsize,
                peers={"copy": Peer(torch.clone, judged=False)},
            )


def digest_inputs(rows: int, columns: int, dtype: torch.dtype) -> Tensors:
    data = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8)
    return (data.view(dtype),)


def whole_sums(tensor: torch.Tensor) -> torch.Tensor:
    return box_sums(tensor, (0, 0), tensor.shape)


def plain_sums(tensor: torch.Tensor) -> torch.Tensor:
    every = matrices(tensor, (0, 0), tensor.shape)
    return torch.stack([digest_matrix_reference(*one) for one in every]).sum(0)

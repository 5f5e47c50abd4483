"""What multiplies fastest on this CPU, measured before an engine's first step."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from vllm_module.kernels.attention.attention_on_pages import can_attend_on_pages
from vllm_module.kernels.matmul.code_rows_matmul import fastest_code_rows
from vllm_module.kernels.matmul.linear import (
    are_loops_worthwhile,
    fastest_float_rows,
    fastest_products,
)
from vllm_module.kernels.matmul.products import Products
from vllm_module.quantization.method import QuantizableLayer


def fastest_for(model: nn.Module, dtype: torch.dtype, *, decodes: bool = True) -> Products:
    """Return what multiplies fastest by a model's weights, with torch's current threads.

    Engines of a process share measurements, which a model of few weights is not worth.

    Args:
        model: a model on the CPU.
        dtype: of its weights that are not quantized, and of its cache.
        decodes: whether it computes single tokens, unlike an encoder.

    """
    threads = torch.get_num_threads()
    chosen = _fastest_products(threads) if dtype == torch.float32 else Products()
    layers = [each for each in model.modules() if isinstance(each, QuantizableLayer)]
    in_loops = decodes and are_loops_worthwhile(model, dtype)
    if in_loops:
        chosen = chosen._replace(floats=_fastest_float_rows(dtype, chosen, threads))
    if any(each.is_quantized for each in layers):
        chosen = chosen._replace(codes=fastest_code_rows(threads))
    in_loops = decodes and (in_loops or chosen.codes > 0)
    return chosen._replace(pages=in_loops and can_attend_on_pages(dtype))


@cache
def _fastest_products(threads: int) -> Products:
    return fastest_products()


@cache
def _fastest_float_rows(dtype: torch.dtype, chosen: Products, threads: int) -> range:
    return fastest_float_rows(dtype, chosen)

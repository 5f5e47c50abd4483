"""The cases of each operation. If one fails its check, its operation's times are unverified."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpu.cases.adapters import adapters
from gpu.cases.attention import decode, options, prefill
from gpu.cases.cache import cache_writes
from gpu.cases.case import Case
from gpu.cases.experts import experts
from gpu.cases.latent import latent
from gpu.cases.matmul import products
from gpu.cases.packed import packed_products
from gpu.cases.quantizing import fused_quantizers, quantizers
from gpu.cases.recurrent import recurrences
from gpu.cases.rows import activations, digests, norms, rotary
from gpu.cases.sampling import sampling

# With true, the small inputs of a CPU. Most important first.
OPERATIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "decode": decode,
    "prefill": prefill,
    "matmul": products,
    "experts": experts,
    "adapters": adapters,
    "sampling": sampling,
    "packed": packed_products,
    "latent attention": latent,
    "cache": cache_writes,
    "norm": norms,
    "rotary": rotary,
    "activation": activations,
    "quantize": quantizers,
    "fused_quantize": fused_quantizers,
    "recurrence": recurrences,
    "attention options": options,
    "digest": digests,
}


def all_cases(small: bool) -> list[tuple[str, Case]]:
    """Return every case with its operation."""
    return [(name, case) for name, make in OPERATIONS.items() for case in make(small)]

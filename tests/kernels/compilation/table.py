"""What the machine code of each main kernel's default is like: the table of design/0017."""

from __future__ import annotations

from collections.abc import Callable

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compilation import attention, experts, products
from compilation.code import Code, read_code
from compilation.launches import compiled, launching, specialized, tried

_ATTENTION = attention.CASES | attention.HOPPER
# What is launched, and the kernel that takes the time.
ROWS: dict[str, tuple[Callable[[], object], str]] = {
    "decode, bf16": (_ATTENTION["attention 128"], "_decode"),
    "decode, e4m3 cache": (_ATTENTION["attention 128, e4m3"], "_decode"),
    "prefill, bf16": (_ATTENTION["attention 128"], "_prefill"),
    "latent decode, 16 heads": (_ATTENTION["latent, 16 heads"], "_decode_latent"),
    "latent decode, 128 heads": (_ATTENTION["latent, 128 heads"], "_decode_latent"),
    "latent decode, 128 heads, e4m3 cache": (
        _ATTENTION["latent, 128 heads, e4m3"],
        "_decode_latent",
    ),
    "FP8 product, 512 tokens": (
        tried(  # torch's own comes before it
            "scaled_matmul",
            "small descriptors",
            products.multiplied(512, 6144, 4096, "fp8 given", 128),
        ),
        "_multiply_described",
    ),
    "FP8 experts, 4096 tokens": (experts.grouped(256, "fp8", 128), "_multiply_groups"),
    "int4 product, 16 tokens, GPTQ": (products.packed(16, "gptq"), "_multiply_packed"),
    "int4 product, 16 tokens, AWQ": (products.packed(16, "awq"), "_multiply_packed"),
}
SHORT = "decode, bf16", "prefill, bf16", "FP8 product, 512 tokens"
HEAD = (
    "| kernel | registers | blocks an SM | tiles ahead | conversions | narrow loads and stores "
    "| matrix instructions |"
)


def rows(*, short: bool) -> list[str]:
    """Return the lines of the table, for compute capability 9.0; if ``short``, some of them."""
    lines = [HEAD, f"|{'---|' * (HEAD.count('|') - 1)}"]
    for name, (launch, kernel) in ROWS.items():
        if short and name not in SHORT:
            continue
        found: list[Code] = []

        def note(
            jit: JITFunction, arguments: dict, options: dict, kernel: str = kernel, found=found
        ) -> None:
            if jit.__name__ == kernel:
                source, target = specialized(jit, arguments), GPUTarget("cuda", 90, 32)
                made = triton.compile(source, target=target, options=options)
                registers = compiled(jit, arguments, options, 90).registers
                found.append(read_code(made, registers))

        with launching(note):
            launch()
        (code,) = found
        matrix = ", ".join(f"{count} {name}" for name, count in code.matrix.items())
        cells = code.registers, code.blocks, code.buffers, code.conversions, code.narrow, matrix
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return lines

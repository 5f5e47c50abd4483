"""What the machine code of a compiled kernel needs of a Hopper GPU, and what its main loop does.

The disassembler is the one that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from compilation.launches import CUOBJDUMP

_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Za-z0-9_.]+)[^;]*?(\.L_x_\d+)?\)?\s*;"
)
_BUFFER = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\w+x\w+)x\w+, [^>]*mutable")
# Of one multiprocessor: registers, bytes of shared memory (a block reserves 1 KiB), warps, blocks.
_REGISTERS, _SHARED, _WARPS, _BLOCKS = 65536, 233472, 64, 32


@dataclass
class Code:
    """What was read of a kernel.

    Attributes:
        registers: of a thread.
        blocks: how many blocks run on a multiprocessor at once.
        buffers: copies of each tile in shared memory, the fewest of all tiles; 0 if tiles are not
            loaded ahead.
        matrix: instructions of the main loop on tensor cores, by their opcode and shape.
        conversions: its conversions of numbers.
        narrow: its loads and stores of shared memory, and loads of global memory, of one or two
            bytes.
        length: all of its instructions.

    """

    registers: int
    blocks: int
    buffers: int
    matrix: dict[str, int]
    conversions: int
    narrow: int
    length: int


def read_code(kernel: Any, registers: int) -> Code:
    """Return what the machine code of a kernel has, as ``triton.compile`` returns it.

    The main loop is the innermost loop with the most instructions on tensor cores, or of all
    instructions if no loop has one.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP.with_name("nvdisasm"), "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    body = max(_loops(text), key=lambda opcodes: (_matrix(opcodes).total(), len(opcodes)))
    tiles = [int(count) for count, _ in _BUFFER.findall(kernel.asm["ttgir"])]
    return Code(
        registers,
        blocks_of(registers, kernel.metadata.shared, kernel.metadata.num_warps),
        min(tiles, default=0),
        dict(_matrix(body)),
        sum(opcode.startswith(("I2F", "F2F", "F2I")) for opcode in body),
        sum(bool(re.match(r"(LDS|STS|LDG)\b.*\.[US](8|16)\b", opcode)) for opcode in body),
        len(body),
    )


def blocks_of(registers: int, shared: int, warps: int) -> int:
    """Return how many blocks run on a multiprocessor of compute capability 9.0 at once."""
    of_a_warp = -(-registers * 32 // 256) * 256
    return min(
        _REGISTERS // (of_a_warp * warps), _SHARED // (shared + 1024), _WARPS // warps, _BLOCKS
    )


def _loops(text: str) -> list[list[str]]:
    """Return the opcodes of each innermost loop of a disassembly; of all of it, if it has none."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if line.startswith(".L_x_"):
            labels[line.rstrip(":")] = len(opcodes)
        elif found := _LINE.search(line):
            _, opcode, target = found.groups()
            opcodes.append(opcode)
            if opcode.startswith("BRA") and target in labels and labels[target] < len(opcodes) - 1:
                loops.append((labels[target], len(opcodes)))
    inner = [
        (begin, end)
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]
    return [opcodes[begin:end] for begin, end in inner] or [opcodes]


def _matrix(opcodes: list[str]) -> Counter[str]:
    found = (re.match(r"([HIQ]G?MMA)\.(?:SP\.)?(\w+)", opcode) for opcode in opcodes)
    return Counter(".".join(each.groups()) for each in found if each)

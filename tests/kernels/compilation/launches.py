"""Compile kernels as they are launched, on a machine without the GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_module.kernels.choices import trying
from vllm_module.kernels.matmul import scaled_matmul

Cases = dict[str, Callable[[], object]]  # what is launched, by name

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


# Of PTX: disassembling the machine code takes far longer than compiling it.
_COUNTED = (
    "wgmma.mma_async",
    "mma.sync",
    "cp.async.cg",
    "cp.async.bulk.tensor",
    "ld.global.v4",
    "st.global.v4",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "min.f32",
    "min.NaN.f32",
    "max.f32",
    "max.NaN.f32",
)


TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


E4M3, E5M2, FP16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32


@dataclass
class Compiled:
    """What one configuration of a kernel needs of the GPU, and some instructions it has."""

    case: str
    kernel: str
    capability: int
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: int  # bytes a thread
    instructions: dict[str, int] = field(default_factory=dict)


def specialized(jit: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """Return the source that a launch with these arguments compiles, as Triton specializes it."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def specialize(value: Any, path: tuple[int, ...], whole: bool, aligned: bool) -> Any:
        """Return the type of an argument, or of an element of a tuple."""
        if isinstance(value, tuple):  # Triton specializes elements on whatever it can
            types = [specialize(v, (*path, index), True, True) for index, v in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if value is None or (isinstance(value, int) and value == 1 and whole):
            constants[path] = value
            return "constexpr"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0 and aligned:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    signature: dict[str, Any] = {}
    for index, parameter in enumerate(jit.params):
        value, whole = arguments[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            aligned = whole and not parameter.do_not_specialize_on_alignment
            signature[parameter.name] = specialize(value, (index,), whole, aligned)
    return ASTSource(jit, signature, constants, attributes)


def compiled(jit: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int):
    source = specialized(jit, arguments)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Compiled(
        case="",
        kernel=jit.__name__,
        capability=capability,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        shared=kernel.metadata.shared,
        registers=int(resources["REG"]),
        spilled=int(resources["STACK"]) + int(resources["LOCAL"]),
        instructions={n: count for n in _COUNTED if (count := kernel.asm["ptx"].count(n))},
    )


@contextmanager
def launching(instead: Callable[[JITFunction, dict[str, Any], dict[str, Any]], None]) -> Iterator:
    """Call ``instead`` with kernel, arguments and options, in place of each launch.

    Torch's own products, which tensors without memory have not, are left out.
    """
    run, by_torch = JITFunction.run, scaled_matmul.multiply_by_torch

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in self.params]
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
        arguments = self.signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        instead(self, arguments.arguments, options)

    JITFunction.run, scaled_matmul.multiply_by_torch = launch, lambda product: None
    try:
        yield
    finally:
        JITFunction.run, scaled_matmul.multiply_by_torch = run, by_torch


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Compile the kernels that are launched in this context, in place of running them."""
    done: list[Compiled] = []
    with launching(lambda *launch: done.append(compiled(*launch, capability))):
        yield done


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def tried(kernel: str, candidate: str, launch: Callable[[], object]) -> Callable[[], object]:
    """Launch a candidate of a kernel, whatever was chosen."""

    def launches() -> None:
        with trying({kernel: candidate}):
            launch()

    return launches

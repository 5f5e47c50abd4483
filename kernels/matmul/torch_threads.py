"""Threads of torch's OpenMP for compiled functions of ours.

numba's own threads would be a second pool beside torch's. Threads of OpenMP go on computing for
some time while they wait, so two pools take the processors from each other, for milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_module.kernels.recording import recording_in_use

# Functions of OpenMP's run-time library.
_THREAD, _THREADS = "omp_get_thread_num", "omp_get_num_threads"


def thread() -> Any:
    """Return the number of this thread, in what numba compiles after :func:`tell_numba`."""
    raise NotImplementedError


def threads() -> Any:
    """Return the number of all threads, in what numba compiles."""
    raise NotImplementedError


def numbers(address: Any, dtype: Any, shape: Any) -> Any:
    """Return numbers at an address as an array, in what numba compiles."""
    raise NotImplementedError


def call(address: Any, argument: Any) -> None:
    """Call a function of C, at an address, with an integer, in what numba compiles."""
    raise NotImplementedError


@functools.cache
def _library() -> ctypes.CDLL:
    """Return torch's library, in which symbols of the OpenMP library that it uses are found."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            if all(hasattr(library, name) for name in (_THREAD, _THREADS, "GOMP_parallel")):
                return library
    raise ImportError("this torch does not use an OpenMP library with GOMP_parallel")


def functions_of_threads() -> dict[str, int]:
    """Return the addresses of :func:`thread` and :func:`threads` in C, by their names in loops.

    The names are our own because numba's threads may use another library's functions.

    Raises:
        ImportError: torch's threads are not those of OpenMP.

    """
    addresses = (
        (name, ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value)
        for name in (_THREAD, _THREADS)
    )
    return {f"vllm_module_{name}": address or 0 for name, address in addresses}


@functools.cache
def tell_numba() -> None:
    """Tell numba what :func:`thread`, :func:`threads`, :func:`numbers` and :func:`call` are.

    Raises:
        ImportError: numba is not installed, or torch's threads are not those of OpenMP.

    """
    from llvmlite import ir
    from numba import carray, types  # type: ignore[attr-defined]  # numba lists few names
    from numba.extending import intrinsic, overload

    @intrinsic
    def cast(typing: Any, address: Any, dtype: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype.dtype)(address, dtype), generate

    @intrinsic
    def call_at(typing: Any, address: Any, argument: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of_c = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            builder.call(builder.inttoptr(arguments[0], of_c.as_pointer()), [arguments[1]])
            return context.get_dummy_value()

        return types.void(address, argument), generate

    casting: Any = cast
    calling: Any = call_at
    own, of_all = (types.ExternalFunction(name, types.int32()) for name in functions_of_threads())
    overload(thread)(lambda: lambda: own())
    overload(threads)(lambda: lambda: of_all())
    overload(numbers)(
        lambda address, dtype, shape: (
            lambda address, dtype, shape: carray(casting(address, dtype), shape)
        )
    )
    overload(call)(
        lambda function, argument: lambda function, argument: calling(function, argument)
    )


@functools.lru_cache(maxsize=256)
def bits_of(number: float) -> int:
    """Return the bits of a float64 as one of the integers that a loop is given."""
    return int(np.float64(number).view(np.int64))


def in_threads(function: Any, threads: int) -> Callable[..., None]:
    """Return what calls a function once in each of some threads of torch, and waits for all.

    It takes the integers of a call, and any objects whose memory no operation of torch has made and
    nothing keeps, for a recording.

    Args:
        function: a :class:`~vllm_module.kernels.matmul.kept_loops.Loop`. It is given the address of
            the call's integers, of 64 bits.
        threads: largest number of threads.

    """
    parallel = _library().GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def call(numbers: Iterable[int], *held: object) -> None:
        given = array("q", numbers)
        work = partial(parallel, function.address, given.buffer_info()[0], threads, 0)
        work()
        if (recording := recording_in_use.get()) is not None:
            recording.add(work, given, function, *held)

    return call

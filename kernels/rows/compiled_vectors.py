"""Sixteen numbers at once, in loops that numba compiles for this CPU.

The compiler makes vectors of loops by itself, but adds up their numbers at the end of each loop:
for blocks of 32 weights that takes as long as multiplying them. Sixteen float32 are one register of
AVX-512, two of AVX2 and four of NEON. The functions below are for what numba compiles after
:func:`tell_numba_of_vectors`. Floats have ``+``, ``-`` and ``*``. Integers have ``|``, and ``&``,
``<<`` and ``>>`` with one number for all.
"""

from __future__ import annotations

import functools
import operator
import zlib
from pathlib import Path
from typing import Any

WRITTEN = zlib.crc32(Path(__file__).read_bytes()) or 1
_COUNT = 16
# A float32 of 2^23 has ones in its last place, and one of 2^19 has sixteenths.
AS_ONES, AS_SIXTEENTHS = 2.0**23, 2.0**19


def spread(value: Any) -> Any:
    """Return one float32 sixteen times."""
    raise NotImplementedError


def floats(array: Any, at: Any) -> Any:
    """Return sixteen numbers of a contiguous float32 array, flat, from its number ``at`` on."""
    raise NotImplementedError


def signed(array: Any, at: Any) -> Any:
    """Return sixteen bytes of a contiguous uint8 array, which are int8, as float32."""
    raise NotImplementedError


def codes(array: Any, at: Any) -> Any:
    """Return sixteen bytes of a contiguous uint8 array as integers of 32 bits."""
    raise NotImplementedError


def bytes_of(low: Any, high: Any) -> Any:
    """Return the bytes of two uint64, from the lowest on, as sixteen integers of 32 bits."""
    raise NotImplementedError


def as_ones(of: Any) -> Any:
    """Return integers below 2^23, plus :data:`AS_ONES`, as float32: exact, and bits are set."""
    raise NotImplementedError


def as_sixteenths(of: Any) -> Any:
    """Return sixteenths of integers below 2^23, plus :data:`AS_SIXTEENTHS`, as float32: exact."""
    raise NotImplementedError


def lane(of: Any, number: Any) -> Any:
    """Return one of sixteen float32 sixteen times; fast if the compiler knows its number."""
    raise NotImplementedError


def total(of: Any) -> Any:
    """Return the sum of sixteen float32."""
    raise NotImplementedError


@functools.cache
def tell_numba_of_vectors() -> None:
    """Tell numba what the functions above are. Raises ``ImportError`` without it."""
    from llvmlite import ir
    from numba import types
    from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
    from numba.extending import lower_builtin, models, register_model

    byte, integer, real = ir.IntType(8), ir.IntType(32), ir.FloatType()
    vector = functools.partial(ir.VectorType, count=_COUNT)

    def kind(name: str, of: Any) -> Any:
        own: Any = type(name, (types.Type,), {})
        register_model(own)(lambda manager, it: models.PrimitiveModel(manager, it, vector(of)))
        return own(name)

    def tell(function: Any, result: Any, given: tuple[Any, ...], generate: Any) -> None:
        """Tell of a function, of how many dimensions its array may be, and how it is generated."""
        first, *rest = given
        arrays = isinstance(first, types.Array)
        cases = [(first.copy(ndim=n), *rest) for n in (1, 2, 3)] if arrays else [given]
        signatures = [signature(result, *case) for case in cases]
        infer_global(function)(type("Vectors", (ConcreteTemplate,), {"cases": signatures}))

        def generated(context: Any, builder: Any, called: Any, values: Any) -> Any:
            own = list(values)
            if arrays:
                own[0] = context.make_array(called.args[0])(context, builder, own[0]).data
            return generate(builder, *own)

        for case in cases:
            lower_builtin(function, *case)(generated)

    def of_all(builder: Any, value: Any) -> Any:
        none = ir.Constant(vector(value.type), ir.Undefined)
        one = builder.insert_element(none, value, integer(0))
        return builder.shuffle_vector(one, none, ir.Constant(vector(integer), [0] * _COUNT))

    def loaded(builder: Any, data: Any, at: Any) -> Any:
        address = builder.gep(data, [at])
        own = vector(address.type.pointee)
        return builder.load(builder.bitcast(address, own.as_pointer()), align=1)

    def codes_at(builder: Any, data: Any, at: Any) -> Any:
        return builder.zext(loaded(builder, data, at), vector(integer))

    def signed_at(builder: Any, data: Any, at: Any) -> Any:
        wide = builder.sext(loaded(builder, data, at), vector(integer))
        return builder.sitofp(wide, vector(real))

    def bytes_of_both(builder: Any, low: Any, high: Any) -> Any:
        own = ir.Constant(ir.VectorType(low.type, 2), ir.Undefined)
        for place, value in enumerate((low, high)):
            own = builder.insert_element(own, value, integer(place))
        return builder.zext(builder.bitcast(own, vector(byte)), vector(integer))

    def one_lane(builder: Any, of: Any, number: Any) -> Any:
        return of_all(builder, builder.extract_element(of, number))

    def with_exponent(bits: int) -> Any:
        own = ir.Constant(vector(integer), [bits] * _COUNT)
        return lambda builder, of: builder.bitcast(builder.or_(of, own), vector(real))

    def with_one(name: str) -> Any:
        def generate(builder: Any, of: Any, value: Any) -> Any:
            return getattr(builder, name)(of, of_all(builder, builder.trunc(value, integer)))

        return generate

    def summed(builder: Any, of: Any) -> Any:
        half = _COUNT
        while half := half // 2:
            others = [(lane + half) % _COUNT for lane in range(_COUNT)]
            moved = builder.shuffle_vector(of, of, ir.Constant(vector(integer), others))
            of = builder.fadd(of, moved)
        return builder.extract_element(of, integer(0))

    some_floats, some_codes = kind("sixteen floats", real), kind("sixteen integers", integer)
    of_floats, of_bytes = (types.Array(each, 1, "C") for each in (types.float32, types.uint8))
    tell(spread, some_floats, (types.float32,), of_all)
    tell(floats, some_floats, (of_floats, types.int64), loaded)
    tell(signed, some_floats, (of_bytes, types.int64), signed_at)
    tell(codes, some_codes, (of_bytes, types.int64), codes_at)
    tell(bytes_of, some_codes, (types.uint64, types.uint64), bytes_of_both)
    tell(lane, some_floats, (some_floats, types.int64), one_lane)
    tell(as_ones, some_floats, (some_codes,), with_exponent(0x4B000000))
    tell(as_sixteenths, some_floats, (some_codes,), with_exponent(0x49000000))
    tell(total, types.float32, (some_floats,), summed)
    for function, name in (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"):
        both = some_floats, some_floats
        tell(
            function, some_floats, both, lambda builder, a, b, own=name: getattr(builder, own)(a, b)
        )
    tell(
        operator.or_, some_codes, (some_codes, some_codes), lambda builder, a, b: builder.or_(a, b)
    )
    for function, name in (
        (operator.and_, "and_"),
        (operator.lshift, "shl"),
        (operator.rshift, "lshr"),
    ):
        tell(function, some_codes, (some_codes, types.int64), with_one(name))

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
from typing import Any

from vllm_module.kernels.matmul.kept_loops import processor

_COUNT = 16
# A float32 of 2^23 has ones in its last place, and one of 2^19 has sixteenths.
AS_ONES, AS_SIXTEENTHS = 2.0**23, 2.0**19


def spread(value: Any) -> Any:
    """Return one float32 sixteen times."""
    raise NotImplementedError


def floats(array: Any, at: Any) -> Any:
    """Return sixteen numbers of a contiguous float32 array, flat, from its number ``at`` on.

    Of a uint16 array, which has the bits of bfloat16, they are 32, for :func:`added`.
    """
    raise NotImplementedError


def added(sums: Any, a: Any, b: Any) -> Any:
    """Return sixteen sums plus sixteen products, or plus two products each of 32 bfloat16.

    Of bfloat16 only where :func:`has_bfloat16`. Sums are float32; subnormal numbers are zero.
    """
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


def write_totals(array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Write the sums of four times sixteen float32 to a contiguous array, from ``at`` on."""
    raise NotImplementedError


def write_rounded(array: Any, at: Any, of: Any) -> None:
    """Write sixteen float32 as bfloat16 to a contiguous uint16 array, flat, from ``at`` on.

    Each is rounded to the nearest, to the even one of two. Only where :func:`has_bfloat16`.
    """
    raise NotImplementedError


def prefetch(address: Any) -> None:
    """Have the processor read 64 bytes into its cache; the address may be anywhere."""
    raise NotImplementedError


def has_bfloat16() -> bool:
    """Return whether numba compiles for a processor that multiplies bfloat16.

    LLVM names that as below since version 17.
    """
    from llvmlite import binding

    return binding.llvm_version_info >= (17,) and "+avx512bf16" in processor()[1].split(",")


def has_many_registers() -> bool:
    """Return whether numba compiles for a processor with registers for 32 vectors of sixteen."""
    return "+avx512f" in processor()[1].split(",")


@functools.cache
def tell_numba_of_vectors() -> None:
    """Tell numba what the functions above are. Raises ``ImportError`` without it."""
    from llvmlite import ir
    from numba import types
    from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
    from numba.extending import lower_builtin, models, register_model

    byte, integer, real = ir.IntType(8), ir.IntType(32), ir.FloatType()

    class Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite is not typed, and has no bfloat16
        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Bfloat)

        def __hash__(self) -> int:
            return hash(Bfloat)

    def vector(of: Any, count: int = _COUNT) -> Any:
        return ir.VectorType(of, count)

    def kind(name: str, of: Any, count: int = _COUNT) -> Any:
        own: Any = type(name, (types.Type,), {})
        register_model(own)(
            lambda manager, it: models.PrimitiveModel(manager, it, vector(of, count))
        )
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

    def pairs_at(builder: Any, data: Any, at: Any) -> Any:
        own = vector(Bfloat(), 2 * _COUNT)
        return builder.load(builder.bitcast(builder.gep(data, [at]), own.as_pointer()), align=2)

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

    def products_added(builder: Any, sums: Any, a: Any, b: Any) -> Any:
        return builder.fadd(sums, builder.fmul(a, b))

    def pairs_added(builder: Any, sums: Any, a: Any, b: Any) -> Any:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        kind = ir.FunctionType(sums.type, (sums.type, a.type, b.type))
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, (sums, a, b))

    def rounded_at(builder: Any, data: Any, at: Any, of: Any) -> Any:
        name, own = "llvm.x86.avx512bf16.cvtneps2bf16.512", vector(Bfloat())
        kind = ir.FunctionType(own, (of.type,))
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        address = builder.bitcast(builder.gep(data, [at]), own.as_pointer())
        builder.store(builder.call(function, (of,)), address, align=2)
        return ir.Constant(byte.as_pointer(), None)

    def shuffled(builder: Any, a: Any, b: Any, numbers: Any) -> Any:
        """Return two and two of each four of ``a`` and of ``b``, by their numbers in eight."""
        own = [
            4 * (at // 4) + (each if each < 4 else each - 4 + _COUNT)
            for at in range(0, _COUNT, 4)
            for each in numbers
        ]
        return builder.shuffle_vector(a, b, ir.Constant(vector(integer), own))

    def both_added(builder: Any, a: Any, b: Any, numbers: Any) -> Any:
        first, second = (shuffled(builder, a, b, each) for each in numbers)
        return builder.fadd(first, second)

    def totals_written(builder: Any, data: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        halves = ((0, 4, 1, 5), (2, 6, 3, 7))
        left, right = both_added(builder, a, b, halves), both_added(builder, c, d, halves)
        of = both_added(builder, left, right, ((0, 1, 4, 5), (2, 3, 6, 7)))
        count = _COUNT
        while (count := count // 2) >= 4:
            parts = [
                ir.Constant(ir.VectorType(integer, count), [*range(first, first + count)])
                for first in (0, count)
            ]
            of = builder.fadd(*(builder.shuffle_vector(of, of, part) for part in parts))
        address = builder.bitcast(builder.gep(data, [at]), of.type.as_pointer())
        builder.store(of, address, align=4)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def prefetched(builder: Any, address: Any) -> Any:
        pointer, name = byte.as_pointer(), "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [pointer, *[integer] * 3])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        read, into_second_level, of_data = integer(0), integer(2), integer(1)
        given = builder.inttoptr(address, pointer), read, into_second_level, of_data
        builder.call(function, given)
        return ir.Constant(pointer, None)

    some_floats, some_codes = kind("sixteen floats", real), kind("sixteen integers", integer)
    pairs = kind("thirty-two bfloat16", Bfloat(), 2 * _COUNT)
    of_floats, of_bits, of_bytes = (
        types.Array(each, 1, "C") for each in (types.float32, types.uint16, types.uint8)
    )
    tell(floats, pairs, (of_bits, types.int64), pairs_at)
    tell(added, some_floats, (some_floats, some_floats, some_floats), products_added)
    tell(added, some_floats, (some_floats, pairs, pairs), pairs_added)
    tell(spread, some_floats, (types.float32,), of_all)
    tell(floats, some_floats, (of_floats, types.int64), loaded)
    tell(signed, some_floats, (of_bytes, types.int64), signed_at)
    tell(codes, some_codes, (of_bytes, types.int64), codes_at)
    tell(bytes_of, some_codes, (types.uint64, types.uint64), bytes_of_both)
    tell(lane, some_floats, (some_floats, types.int64), one_lane)
    tell(as_ones, some_floats, (some_codes,), with_exponent(0x4B000000))
    tell(as_sixteenths, some_floats, (some_codes,), with_exponent(0x49000000))
    tell(total, types.float32, (some_floats,), summed)
    tell(write_totals, types.none, (of_floats, types.int64, *[some_floats] * 4), totals_written)
    tell(write_rounded, types.none, (of_bits, types.int64, some_floats), rounded_at)
    tell(prefetch, types.none, (types.int64,), prefetched)
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

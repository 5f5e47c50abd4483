"""Pickles of tensors, hand-made: torch.load decides what one that is accepted holds."""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import (
    _rebuild_parameter,
    _rebuild_tensor,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
)

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.pickled.pickle_records import RecordReader

STORED = torch.arange(24.0)


class Call:
    """What is pickled as a call of ``function``."""

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, state: Any = None, items: Any = ()
    ) -> None:
        self.reduced = function, arguments, state
        self.items = items

    def __reduce__(self) -> tuple[Any, ...]:
        return (*self.reduced, None, iter(self.items) if self.items else None)


class Stored:
    """What is pickled as a storage."""

    def __init__(self, kind: Any = torch.FloatStorage, key: Any = "0", count: Any = 24) -> None:
        self.identity = "storage", kind, key, "cpu", count


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, Stored) else None


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def archive(data: bytes, version: bytes = b"3\n") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        written.writestr("archive/data.pkl", data)
        written.writestr("archive/byteorder", "little")
        written.writestr("archive/data/0", STORED.numpy().tobytes())
        written.writestr("archive/version", version)
    return stream.getvalue()


def tensor(
    offset: Any = 0, shape: Any = (4, 6), strides: Any = (6, 1), grad: Any = False, **storage: Any
) -> Call:
    hooks: Any = OrderedDict()
    return Call(_rebuild_tensor_v2, Stored(**storage), offset, shape, strides, grad, hooks)


def typed(dtype: torch.dtype, count: int = 96) -> Call:
    storage = Stored(torch.UntypedStorage, "0", count)
    hooks: Any = OrderedDict()
    return Call(_rebuild_tensor_v3, storage, 2, (3, 2), (8, 3), False, hooks, dtype)


ACCEPTED: dict[str, Any] = {
    "parts of one storage": {
        "a": tensor(),
        "b": tensor(6, (2, 3), (6, 2)),
        "c": tensor(23, (), ()),
    },
    "transposed": {"a": tensor(0, (6, 4), (1, 6))},
    "an older call": {"a": Call(_rebuild_tensor, Stored(), 3, (5,), (4,))},
    "a parameter": {"a": Call(_rebuild_parameter, tensor(), True, OrderedDict())},
    "a dtype of its own": {"a": typed(torch.float8_e4m3fn), "b": typed(torch.uint16)},
    "without elements": {"a": tensor(30, (3, 0), (9, 9))},
    "attributes of a dict": Call(
        OrderedDict, state={"_metadata": {"": {"version": 1}}}, items=[("a", tensor())]
    ),
    "a size of one with any stride": {"a": tensor(0, (1, 4), (0, 1))},
}


STORAGES = {  # with the sizes of their elements in bytes
    torch.DoubleStorage: 8, torch.FloatStorage: 4, torch.HalfStorage: 2, torch.BFloat16Storage: 2,
    torch.LongStorage: 8, torch.IntStorage: 4, torch.ShortStorage: 2, torch.CharStorage: 1,
    torch.ByteStorage: 1, torch.BoolStorage: 1, torch.ComplexFloatStorage: 8,
}  # fmt: skip
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
ACCEPTED |= {
    f"a storage of {kind.__name__}": {"a": tensor(1, (2, 2), (3, 2), count=96 // size, kind=kind)}
    for kind, size in STORAGES.items()
}
ACCEPTED |= {f"a dtype of {dtype}": {"a": typed(dtype)} for dtype in DTYPES if dtype.itemsize < 8}
# The first bytes are 0, which a bool may be.
ACCEPTED["a storage of BoolStorage"] = {
    "a": tensor(0, (4,), (1,), count=96, kind=torch.BoolStorage)
}
ACCEPTED |= {
    f"{name} with the last element": {"a": tensor(*where)}
    for name, where in {
        "rows": (0, (4, 6), (6, 1)), "an offset": (23, (1,), (1,)), "strides": (2, (2, 2), (14, 7)),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_accepted_is_what_torch_reads(case: str, tmp_path: Path) -> None:
    """Names, dtypes, shapes and bits are those of torch.load."""
    (tmp_path / "m.pt").write_bytes(archive(pickled(ACCEPTED[case])))
    stored = torch.load(tmp_path / "m.pt", weights_only=True)
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert [*checkpoint] == [*stored.keys()]
        for name, handle in checkpoint.items():
            read = handle.read()
            assert (read.dtype, read.shape) == (stored[name].dtype, stored[name].shape)
            bits, expected = (
                each.detach().contiguous().view(-1).view(torch.uint8)
                for each in (read, stored[name])
            )
            assert torch.equal(bits, expected)


def nested(depth: int) -> Any:
    """A list in a list, so deep that a function which calls itself for each would fail."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def deep(operation: bytes) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + operation + b"s."


def doubled(begin: bytes, each: bytes, times: int = 60) -> bytes:
    """A tuple of values of which each holds the one before twice."""
    return deep(b"(" + begin + each * times + b"t")


SIZES = "shape, strides and offset are no sizes"
REFUSED: dict[str, tuple[Any, str]] = {
    "a negative stride": ({"a": tensor(6, strides=(-6, 1))}, f"tensor 'a': its {SIZES}"),
    "a negative offset": ({"a": tensor(-1)}, f"tensor 'a': its {SIZES}"),
    "a negative size": ({"a": tensor(shape=(-4, 6))}, f"tensor 'a': its {SIZES}"),
    "a size of another type": ({"a": tensor(shape=(4, 6.0))}, f"tensor 'a': its {SIZES}"),
    "fewer strides": ({"a": tensor(strides=(1,))}, f"tensor 'a': its {SIZES}"),
    "an offset of 2**63": ({"a": tensor(1 << 63)}, f"tensor 'a': its {SIZES}"),
    "an offset near it": ({"a": tensor((1 << 63) - 1)}, "'a': its storage should have 3689348"),
    "strides that overflow": ({"a": tensor(strides=(1 << 62, 1))}, "'a': its storage should have"),
    "too many elements": ({"a": tensor(shape=(1 << 40, 1 << 40))}, "has too many elements"),
    "the same with none": ({"a": tensor(shape=(0, 1 << 40, 1 << 40), strides=(1, 1, 1))}, "elemen"),
    "many dimensions": ({"a": tensor(shape=(1,) * 65, strides=(1,) * 65)}, "no shape and strides"),
    "an element too many": ({"a": tensor(24, (1,), (1,))}, "have 100 bytes, and its member"),
    "a stride too long": ({"a": tensor(3, (2, 2), (14, 7))}, "have 100 bytes, and its member"),
    "rows that meet": ({"a": tensor(0, (2, 3), (2, 1))}, "share memory"),
    "a stride of none": ({"a": tensor(0, (2, 3), (0, 1))}, "share memory"),
    "a row too many": ({"a": tensor(shape=(5, 6))}, "have 120 bytes, and its member .* has 96"),
    "elements that share memory": ({"a": tensor(shape=(4, 6), strides=(1, 1))}, "share memory"),
    "gradients of integers": ({"a": tensor(grad=True, kind=torch.IntStorage)}, "has properties"),
    "a storage that is elsewhere": ({"a": tensor(key="7")}, "'a': its storage '7' is in none of"),
    "a longer storage": ({"a": tensor(count=25)}, "'a': its storage '0' should have 100 bytes"),
    "a storage of two types": (
        {"a": tensor(), "b": tensor(kind=torch.IntStorage)}, "has 24 elements of torch.FloatStorage"
    ),
    "a storage that is named by a number": ({"a": tensor(key=0)}, "without type, name and size"),
    "a storage of a dtype": ({"a": tensor(kind=torch.float32)}, "a storage of 'torch.float32'"),
    "a tensor without storage": ({"a": Call(_rebuild_tensor, 0, 0, (1,), (1,))}, "without a stor"),
    "a call with too little": ({"a": Call(_rebuild_tensor_v2, Stored())}, "other arguments than"),
    "a parameter of a number": ({"a": Call(_rebuild_parameter, 1, True, {})}, "other arguments"),
    "a dtype that is called": ({"a": Call(torch.UntypedStorage, 1 << 40)}, "other arguments than"),
    "a quantized dtype": ({"a": tensor(kind=torch.QInt8Storage)}, "'a': it is of torch.QInt8Sto"),
    "numpy's scalar": ({"a": np.float64(1)}, r"asks for 'numpy\.\S+scalar', which is not read"),
    "a device": ({"a": torch.device("cpu")}, "asks for 'torch.device', which is not read"),
    "a dict made of pairs": (Call(OrderedDict, [["a", 1]]), "an?.* collections.OrderedDict of"),
    "a list of lists": ({"a": nested(300)}, "'a' is a list, and only tensors are read"),
    "a deep list": (deep(b"(" * 100_000 + b"l" * 100_000), "has LIST, which torch does not write"),
    "deep tuples": (deep(b")" + b"\x85" * 100_000), "'a' is a tuple, and only tensors are read"),
    "doubled tuples": (doubled(b")", b"q\x00h\x00\x86"), "'a' is a tuple, and only"),
    "doubled lists": (doubled(b"]", b"q\x00](h\x00h\x00e"), "'a' is a tuple, and only"),
    "doubled dicts": (
        doubled(b"ccollections\nOrderedDict\n)R", b"q\x00ccollections\nOrderedDict\n)R"
        b"(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00u"), "'a' is a tuple, and only"
    ),
    "a tuple as a key": ({(1, 2): tensor()}, "a dict with a key of type tuple"),
    "large numbers as keys": ({1 << 70: tensor()}, "a dict with a key of type int"),
    "a stack that is empty": (b"\x80\x02\x85.", "its pickle is broken"),
    "a mark that is missing": (b"\x80\x02K\x01t.", "its pickle is broken"),
    "a number that is not kept": (b"\x80\x02h\x05.", "its pickle is broken"),
    "no end": (b"\x80\x02}", "its pickle is broken"),
    "an empty name": (b"\x80\x02c\n\n.", "asks for '.', which is not read"),
    "a name in parts": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.", "asks for"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_tensor_is_refused(case: str, tmp_path: Path) -> None:
    """It ends at once, with the tensor's name where there is one, and nothing is called."""
    value, message = REFUSED[case]
    data = value if isinstance(value, bytes) else pickled(value)
    (tmp_path / "m.pt").write_bytes(archive(data))
    begin = time.perf_counter()
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        open_checkpoint(tmp_path / "m.pt")
    assert time.perf_counter() - begin < 5
    assert str(refused.value).startswith(f"{tmp_path}/m.pt: ")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("version", [b"11\n", b"0", b"", b"x", b"3" * 100])
def test_another_version_of_the_archive_is_refused(version: bytes, tmp_path: Path) -> None:
    """torch.load reads versions 1 to 10."""
    (tmp_path / "m.pt").write_bytes(archive(pickled({"a": tensor()}), version))
    with pytest.raises(CheckpointFormatError, match=r"its version is .*: expected one of 1 to 10"):
        open_checkpoint(tmp_path / "m.pt")
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        torch.load(tmp_path / "m.pt", weights_only=True)


def test_a_pickle_of_many_operations_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dict takes a byte there and 64 in memory, so that 100 MB would take 6 GB."""
    monkeypatch.setattr(RecordReader, "most_operations", 1000)
    (tmp_path / "m.pt").write_bytes(archive(b"\x80\x02" + b"}" * 2000 + b"."))
    with pytest.raises(CheckpointFormatError, match=r"more than the 1000 operations that are read"):
        open_checkpoint(tmp_path / "m.pt")

"""Hostile headers and names give a CheckpointFormatError or the stored tensor."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vllm_module import vLLMModule
from vllm_module.errors import CheckpointFormatError, UnexpectedWeightError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.header import MAX_HEADER_BYTES
from vllm_module.weights.safetensors import SafetensorsFile

INDEX = "model.safetensors.index.json"


def text(shape: str = "[4]", offsets: str = "[0, 4]", dtype: str = '"U8"', more: str = "") -> bytes:
    """A header of one tensor, as text, so that its JSON can be anything."""
    entry = f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}{more}}}'
    return f'{{"w": {entry}}}'.encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        # Sizes that are not sizes.
        (text(shape="[-0]", offsets="[0, 0]"), r"shape should be a list of sizes, and is \[-0.0\]"),
        (text(shape="[4e0]"), "shape should be a list of sizes"),
        (text(shape="[1e3]"), "shape should be a list of sizes"),
        (text(shape="[1e400]"), "'1e400' is out of range"),
        (text(shape="[4.0]"), "shape should be a list of sizes"),
        (text(shape="[true]"), "shape should be a list of sizes"),
        (text(shape="[null]"), "shape should be a list of sizes"),
        (text(shape="[[4]]"), "shape should be a list of sizes"),
        (text(shape='{"0": 4}'), "shape should be a list of sizes"),
        (text(shape="[NaN]"), "NaN is not JSON"),
        (text(shape="[-Infinity]"), "-Infinity is not JSON"),
        (text(shape="[04]"), "not valid JSON"),
        (text(shape="[+4]"), "not valid JSON"),
        (text(shape="[0x4]"), "not valid JSON"),
        (text(offsets="[-0, 4]"), "data_offsets should be"),
        (text(offsets="[false, 4]"), "data_offsets should be"),
        (text(offsets="[4, 0]"), "data_offsets should be"),
        (text(offsets="[]"), "data_offsets should be"),
        (text(offsets=f"[{2**63}, {2**63 + 4}]"), "data_offsets should be"),
        (text(offsets=f"[{2**64}, {2**64 + 4}]"), "data_offsets should be"),
        (text(offsets=f"[{2**62}, {2**62 + 4}]"), "leaves a hole"),
        # Sizes whose product is too large, although the tensor is empty.
        (text(f"[{2**62}, {2**62}, 0]", "[0, 0]"), "less than 2\\*\\*63 bytes together"),
        (text(f"[0, {2**62}, {2**62}]", "[0, 0]"), "less than 2\\*\\*63 bytes together"),
        (text(f"[{2**60}, 0]", "[0, 0]", '"F64"'), "less than 2\\*\\*63 bytes together"),
        (text(f"[{2**32}, {2**32}]"), "less than 2\\*\\*63 bytes together"),
        (text("[" + "1," * 64 + "4]"), "at most 64 sizes"),
        (text("[" + "1," * 99_999 + "4]"), "at most 64 sizes"),
        (text(f"[{','.join([str(2**62)] * 5000)}]"), "at most 64 sizes"),
        # Integers that are slow to parse, and nesting that is deep.
        (text(shape=f"[{'9' * 100_000}]"), "an integer has 100000 digits"),
        (text(more=f', "x": -{"9" * 100_000}'), "an integer has 100001 digits"),
        (text(more=f', "x": {"[" * 50_000}{"]" * 50_000}'), "not valid JSON"),
        (text(more=', "x": ' + '{"": ' * 50_000 + "0" + "}" * 50_000), "not valid JSON"),
        (text(shape="[" * 500 + "]" * 500), "shape should be a list of sizes"),
        (b'{"w": ' + b"[" * 900 + b"]" * 900 + b"}", "an object with dtype|not valid JSON"),
        # A key that occurs twice, at each level; also written with an escape.
        (b'{"w": 1, "\\u0077": 2}', "'w' occurs twice"),
        (b'{"__metadata__": {"a": "1", "a": "2"}}', "'a' occurs twice"),
        (b'{"__metadata__": {}, "__metadata__": {}}', "'__metadata__' occurs twice"),
        (text(more=', "shape": [4]'), "'shape' occurs twice"),
        (text(more=', "x": {"y": {"z": 1, "z": 1}}'), "'z' occurs twice"),
        # Dtypes.
        (text(dtype='"u8"'), "dtype should be one of"),
        (text(dtype='"U8 "'), "dtype should be one of"),
        (text(dtype='""'), "dtype should be one of"),
        (text(dtype="null"), "dtype should be one of"),
        (text(dtype='{"U8": 1}'), "dtype should be one of"),
        (text(dtype='"__class__"'), "dtype should be one of"),
        (text(dtype='"C64"'), "32 bytes apart"),
        # Halves of surrogate pairs, which the reference refuses and nothing can print.
        (b'{"\\ud800": {}}', "surrogates not allowed"),
        (b'{"\\udc00\\ud800": {}}', "surrogates not allowed"),
        (b'{"__metadata__": {"a": "\\uDfff"}}', "surrogates not allowed"),
        (text(more=', "x": [{"\\uDBFF": 1}]'), "surrogates not allowed"),
        (text(more=', "x": 1e999'), "'1e999' is out of range"),
        # Bytes that are not text, and bytes after the end.
        (b'{"\xed\xa0\x80": 1}', "not valid JSON"),
        (b'{"a\0b": 1}', "not valid JSON"),
        (b'{"a": 1}\0', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "should begin with"),
        (b'{"w": {}, }', "not valid JSON"),
        (b"{'w': {}}", "not valid JSON"),
        (b'{"w": {}} // end', "not valid JSON"),
        (b'{"__metadata__": []}', "__metadata__ should map strings to strings"),
        (b'{"__metadata__": {"a": null}}', "__metadata__ should map strings to strings"),
        (b'{"__metadata__": {"a": {}}}', "__metadata__ should map strings to strings"),
    ],
)
def test_a_hostile_header_is_refused_in_a_few_words(write_file, header, message) -> None:
    path = write_file(header, b"\0\1\2\3")
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        SafetensorsFile(path)
    assert str(refusal.value).startswith(str(path))
    assert len(str(refusal.value)) < len(str(path)) + 900


@pytest.mark.parametrize("length", [0, 1, 2, 7, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_length_that_lies_takes_no_memory(write_file, length: int) -> None:
    path = write_file(text(), b"\0\1\2\3", length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("piece", "refused"),
    [
        (b"[],", False),
        (b"{},", False),
        (b"[[[]]],", False),
        (b"0,", False),
        (b"1000,", False),
        (b"1.5,", False),
        (b'"\xf0\x9f\x92\xa5x",', False),
        (b"[],", True),
        (b"{},", True),
        (b"0,", True),
    ],
)
def test_memory_is_bounded_by_the_headers_size(write_file, piece: bytes, refused: bool) -> None:
    """A value of three bytes takes a hundred in memory, so millions of values are not parsed.

    The bound is that of the whole: bytes, text, values and the error message.
    """
    size = 20_000_000 if refused else 300_000
    header = b'{"w": [' + piece * (size // len(piece)) + b"0]}"
    path = write_file(header)
    tracemalloc.start()
    try:
        message = "brackets, colons and commas" if refused else "an object with dtype"
        with pytest.raises(CheckpointFormatError, match=message) as refusal:
            SafetensorsFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (3 if refused else 40) * len(header)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("kind", ["tensors", "metadata"])
def test_memory_is_bounded_for_a_header_that_is_valid(write_file, kind: str) -> None:
    count = 5_000
    if kind == "tensors":
        header = {
            f"{index:x}": {"dtype": "U8", "shape": [], "data_offsets": [index, index + 1]}
            for index in range(count)
        }
        path = write_file(json.dumps(header, separators=(",", ":")).encode(), b"\1" * count)
    else:
        path = write_file({"__metadata__": {f"{index:x}": "" for index in range(count)}})
    tracemalloc.start()
    try:
        file = SafetensorsFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(file) == (count if kind == "tensors" else 0)
    assert peak < 40 * path.stat().st_size


def test_a_sparse_header_of_the_largest_size_is_refused_at_once(write_file) -> None:
    """100 MB of NULs that take no space on disk."""
    path = write_file(b"{", length=MAX_HEADER_BYTES)
    with path.open("r+b") as file:
        file.truncate(8 + MAX_HEADER_BYTES)
    with pytest.raises(CheckpointFormatError, match="not valid JSON"):
        SafetensorsFile(path)


NAMES = [
    "",
    ".",
    "..",
    "...",
    "__class__",
    "__dict__",
    "__metadata__x",
    "_parameters",
    "_parameters.weight",
    "_modules.child.weight",
    "_modules.x",
    "load_state",
    "load_state.loaded",
    "child.__class__",
    "child._parameters.weight",
    "weight.__class__",
    "weight.data",
    "weight.",
    ".weight",
    "child..weight",
    "child",
    "child.weight.grad",
    "load_weights",
    "forward",
    "forward.__globals__",
    "load_report",
    "training",
    "T_destination",
    "\0",
    "weight\0",
    "a\nb",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202ethgiew",
    "we\u0456ght",  # a Cyrillic letter
    "weight\u200b",
    "\U0001f4a5",
    "../../etc/passwd",
    "C:\\weight",
    "%s%n{0.__class__}",
    "0",
    "-1",
    "9" * 1000,
    "." * 1000,
    "x" * 1024,
]


class Child(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)


class Model(Child):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()
        self.plain = nn.Module()

    def __getattr__(self, name: str) -> Any:
        # Only a lookup by a name of the checkpoint could ask for these.
        assert name == "child" or name not in NAMES, name
        return super().__getattr__(name)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:30]))
def test_a_hostile_name_is_a_key_and_nothing_more(write_file, name: str) -> None:
    """The tensor opens and reads as any other; a model reports it and looks up no attribute."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    checkpoint = open_checkpoint(write_file({name: entry}, b"\0\1\2\3"))
    assert list(checkpoint) == [name]
    assert checkpoint[name].read().tolist() == [0, 1, 2, 3]
    model = Model()
    before = vars(model) | {"load_state": replace(model.load_state, loaded={})}
    with pytest.raises(UnexpectedWeightError) as refusal:
        model.update_weights(checkpoint.items())
    assert [problem.name for problem in refusal.value.report.unexpected] == [name]
    assert vars(model) == before
    assert model.weight.tolist() == model.child.weight.tolist() == [0, 0, 0, 0]


def test_a_tensor_called_metadata_is_metadata(write_file) -> None:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    with pytest.raises(CheckpointFormatError, match="__metadata__ should map strings"):
        SafetensorsFile(write_file({"__metadata__": entry}, b"\0\1\2\3"))


def test_a_name_without_end_is_refused(write_file) -> None:
    """A report with such a name would fill the screen."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    with pytest.raises(CheckpointFormatError, match="at most 1024 characters, and is 100000") as no:
        SafetensorsFile(write_file({"x" * 100_000: entry}, b"\0\1\2\3"))
    assert len(str(no.value)) < 1000


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [([], "I32"), ([0], "F64"), ([0, 7, 0], "U8"), ([2**40, 0], "U8"), ([1] * 64, "I32")],
)
def test_tensors_of_no_dimension_no_element_or_many_dimensions_load(
    write_file, shape: list[int], dtype: str
) -> None:
    size = 0 if 0 in shape else 4
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    path = write_file({"w": entry}, b"\1\2\3\4"[:size])
    handle = SafetensorsFile(path)["w"]
    tensor = handle.read()
    assert list(tensor.shape) == shape
    assert torch.equal(tensor, load_file(path)["w"])
    for dim in range(len(shape)):
        assert torch.equal(handle.narrow(dim, 0, shape[dim]).read(), tensor)
        assert torch.equal(handle.narrow(dim, 0, 0).read(), tensor.narrow(dim, 0, 0))


def refused_words(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointFormatError) as refusal:
        act()
    return str(refusal.value)


HOSTILE = "\x1b[2J\n\u202e\x7f\x9b"


def test_no_message_can_rewrite_the_terminal(tmp_path: Path, write_file) -> None:
    """Every message that quotes a checkpoint is printable and has one line."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    bad = [
        {HOSTILE: 1},
        {HOSTILE: entry | {"dtype": HOSTILE}},
        {HOSTILE: entry | {"shape": [HOSTILE]}},
        {HOSTILE: entry | {"data_offsets": {HOSTILE: HOSTILE}}},
        {HOSTILE: entry, HOSTILE + "2": entry},
        {"__metadata__": {HOSTILE: 1}},
        f"{{{json.dumps(HOSTILE)}: 1, {json.dumps(HOSTILE)}: 2}}".encode(),
    ]
    words = [refused_words(lambda h=h: SafetensorsFile(write_file(h, b"1234"))) for h in bad]

    index = tmp_path / "indexed"
    index.mkdir()
    maps = [
        {HOSTILE: "../x"},
        {HOSTILE: HOSTILE},
        {"w": f"{HOSTILE}.safetensors"},
        {"w": "\x1b[2J.safetensors"},
        HOSTILE,
    ]
    for weight_map in maps:
        (index / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        words.append(refused_words(lambda: open_checkpoint(index)))
    # The file exists under a name that is not printable.
    write_file({"v": entry}, b"1234").rename(index / "\x1b[2J.safetensors")
    (index / INDEX).write_text(json.dumps({"weight_map": {"w": "\x1b[2J.safetensors"}}))
    words.append(refused_words(lambda: open_checkpoint(index)))
    (index / INDEX).unlink()
    (index / "2\x1b[2J.safetensors").write_bytes((index / "\x1b[2J.safetensors").read_bytes())
    words.append(refused_words(lambda: open_checkpoint(index)))
    handle = open_checkpoint(index / "\x1b[2J.safetensors")["v"]
    words.append(repr(handle))

    folder = tmp_path / "listed"
    folder.mkdir()
    (folder / "\x1b[2J.txt").touch()
    (folder / b"\xff\x1b.bin".decode("utf-8", "surrogateescape")).touch()
    words.append(refused_words(lambda: open_checkpoint(folder)))
    (folder / "x.safetensors").symlink_to("\x1b[2J")
    words.append(refused_words(lambda: open_checkpoint(folder)))
    for text in words:
        text.encode()
        assert text.isprintable(), ascii(text)

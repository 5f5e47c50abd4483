"""What must hold for any bytes that are a checkpoint or a request; fuzzing and tests check it.

``KINDS`` has a function for each kind of input. It raises ``AssertionError``, or any other
unexpected exception, if the bytes broke something.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import product
from operator import mul
from pathlib import Path

import numpy
import safetensors
import torch

from vllm_module.build.model_source import read_config
from vllm_module.build.registry import model_class, supported_architectures
from vllm_module.config import ModelConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightReadError
from vllm_module.layout import parse_layout
from vllm_module.quantization.quant_state import LONGEST, QuantState
from vllm_module.weights import Checkpoint, open_checkpoint
from vllm_module.weights.handle import FileHandle
from vllm_module.weights.header import DTYPES

# Separates the index and the files a.safetensors and b.safetensors of a folder.
CUT = b"\n---\n"
MOST_WORDS = 4000
MOST_ELEMENTS = 1 << 14  # of a layout that is compared with its elements, one by one

# These read what other packages announce, and import transformers, outside of the watched folder.
supported_architectures()
with suppress(UnsupportedModelError):
    model_class(["Unknown"])
_INSTALLED = os.path.realpath(sysconfig.get_path("purelib")) + os.sep
_IMPORTED = re.compile(r"\.(pyc?|pyc\.\d+|so)$")  # Python writes .pyc.<number> and renames it
_watched: list[str] = []  # the only folder in which files may be opened now
_hooked = False


def check_file(folder: Path, data: bytes) -> None:
    """Check ``data`` as the one file of a checkpoint."""
    (folder / "model.safetensors").write_bytes(data)
    _check(folder, [data])


def check_folder(folder: Path, data: bytes) -> None:
    """Check ``data`` as an index and two files."""
    index, first, second = [*data.split(CUT, 2), b"", b""][:3]
    (folder / "model.safetensors.index.json").write_bytes(index)
    (folder / "a.safetensors").write_bytes(first)
    (folder / "b.safetensors").write_bytes(second)
    _check(folder, [first, second])


def check_torch(folder: Path, data: bytes) -> None:
    """Check ``data`` as a file of torch.save: what is accepted, torch.load reads too."""
    path = folder / "pytorch_model.bin"
    path.write_bytes(data)
    try:
        with _only_inside(folder), open_checkpoint(folder) as checkpoint:
            readable = _check_tensors(checkpoint)
            try:
                stored = torch.load(path, map_location="cpu", weights_only=True)
            except RuntimeError as error:
                if "failed reading zip archive" in str(error):
                    return  # it checks numbers in the list of members that Python does not
                raise
            assert stored.keys() == set(checkpoint), "torch finds other names"
            for name, tensor in stored.items():
                handle = checkpoint[name]
                assert (tensor.dtype, tensor.shape) == (handle.dtype, handle.shape)
                assert name not in readable or _bytes(handle.read()) == _bytes(tensor)
            assert len(checkpoint.fingerprint) == 64
    except CheckpointFormatError as error:
        _check_words(error)


def check_npcache(folder: Path, data: bytes) -> None:
    """Check ``data`` as a list of names and the files w and v: numpy reads what is accepted."""
    names, first, second = [*data.split(CUT, 2), b"", b""][:3]
    (folder / "np").mkdir(exist_ok=True)
    (folder / "np" / "weight_names.json").write_bytes(names)
    (folder / "np" / "w").write_bytes(first)
    (folder / "np" / "v").write_bytes(second)
    try:
        with _only_inside(folder), open_checkpoint(folder, "npcache") as checkpoint:
            readable = _check_tensors(checkpoint)
            assert set(checkpoint) == set(json.loads(names))
            for name in readable:
                array = numpy.load(folder / "np" / name)
                handle = checkpoint[name]
                assert tuple(handle.shape) == array.shape
                assert _bytes(handle.read()) == array.tobytes()
            assert len(checkpoint.fingerprint) == 64
    except CheckpointFormatError as error:
        _check_words(error)


def check_gguf(folder: Path, data: bytes) -> None:
    """Check ``data`` as a GGUF file: it is refused, or each tensor reads the same in parts."""
    (folder / "model.gguf").write_bytes(data)
    try:
        with _only_inside(folder), open_checkpoint(folder) as checkpoint:
            for handle in checkpoint.values():
                whole = handle.read()
                assert (whole.shape, whole.dtype) == (handle.shape, handle.dtype)
                begin, end = handle.byte_range
                assert 24 <= begin <= end <= len(data)
                for dim, size in enumerate(handle.shape):
                    part = handle.narrow(dim, size // 2, size - size // 2).read()
                    assert _bytes(part) == _bytes(whole.narrow(dim, size // 2, part.shape[dim]))
            assert checkpoint.nbytes <= len(data)
            assert len(checkpoint.fingerprint) == 64
    except (CheckpointFormatError, UnsupportedModelError) as error:
        _check_words(error)


def check_dcp(folder: Path, data: bytes) -> None:
    """Check ``data`` as the metadata of a trainer's checkpoint of one file, which has zeros."""
    (folder / ".metadata").write_bytes(data)
    (folder / "__0_0.distcp").write_bytes(bytes(1 << 12))
    try:
        with _only_inside(folder), open_checkpoint(folder, "dcp") as checkpoint:
            for handle in checkpoint.values():
                if 0 < handle.shape.numel() < 1 << 20:
                    handle.read()
    except (CheckpointFormatError, WeightReadError) as error:
        _check_words(error)


def check_manifest(folder: Path, data: bytes) -> None:
    """Check ``data`` as the manifest of a sharded state whose files are missing."""
    (folder / "sharded_state.json").write_bytes(data)
    try:
        with _only_inside(folder), open_checkpoint(folder):
            pass
    except CheckpointFormatError as error:
        _check_words(error)


def check_layout(folder: Path, data: bytes) -> None:
    """Check ``data`` as a layout, with the digest of its entries: it is refused, or covers all."""
    try:
        value = json.loads(data)
        assert isinstance(value, dict)
        value.pop("sha256", None)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        data = json.dumps({**value, "sha256": sha256(text.encode()).hexdigest()}).encode()
    except (ValueError, AssertionError, RecursionError):
        pass  # parsed as it is
    try:
        layout = parse_layout(data)
    except CheckpointFormatError as error:
        _check_words(error)
        return
    sizes = [(entry.experts or (0, 1))[1] * math.prod(entry.shape) for entry in layout.tensors]
    if layout.ranks * sum(sizes) > MOST_ELEMENTS:  # too many to be written out
        return
    filled: dict[tuple[int, str], list[int]] = {}
    for name, entry, expert in layout.names():
        numel = math.prod(entry.shape)
        held = set[int]()
        for ranks, box in layout.held_by(entry, expert):
            view = box.view or entry.shape
            places = torch.arange(numel).reshape(view)
            for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
                places = places.narrow(dim, start, size)
            held |= set(places.flatten().tolist())
            steps = (map(range, box.held.shape), box.held.strides)
            values = [
                box.held.offset + sum(map(mul, index, steps[1])) for index in product(*steps[0])
            ]
            for rank in ranks if entry.tied_to is None else ():
                filled.setdefault((rank, entry.parameter), []).extend(values)
        same = [e for e in layout.tensors if e.name == entry.name and e.experts == entry.experts]
        assert len(held) == numel or len(same) > 1, name
    for (rank, path), places in filled.items():
        assert len(set(places)) == len(places), (rank, path)


def check_quant_state(folder: Path, data: bytes) -> None:
    """Check ``data`` as what bitsandbytes stores of a tensor in four bits."""
    stored = torch.tensor([*data[:LONGEST].ljust(LONGEST, b"\0")], dtype=torch.uint8)
    try:
        state = QuantState.parse(stored, "w.quant_state")
        state.check("w.quant_state", "nf4", 64, [[8, 64]], state.nested_offset is not None)
    except (CheckpointFormatError, WeightReadError) as error:
        _check_words(error)


def check_config(folder: Path, data: bytes) -> None:
    """Check ``data`` as a configuration: it names a known class or is refused."""
    (folder / "config.json").write_bytes(data)
    try:
        with _only_inside(folder):
            config = read_config(folder, ModelConfig(model=str(folder)))
        model_class(config.architectures)
    except CheckpointFormatError as error:
        _check_words(error)
        return
    except UnsupportedModelError as error:
        _check_lines(error)
        return
    assert config.context_length is None or type(config.context_length) is int


def _check(folder: Path, files: list[bytes]) -> None:
    try:
        with _only_inside(folder), open_checkpoint(folder) as checkpoint:
            readable = _check_tensors(checkpoint)
            opened = [files[path.name == "b.safetensors"] for path in checkpoint.files]
            stored = _by_the_library(opened)
            assert stored.keys() == set(checkpoint), "the library finds other names"
            for name, (dtype, shape, raw) in stored.items():
                handle = checkpoint[name]
                stored_as = f"torch.{DTYPES[dtype].name}", shape
                assert stored_as == (str(handle.dtype), list(handle.shape))
                assert handle.contiguous
                assert name not in readable or _bytes(handle.read()) == raw
            assert checkpoint.nbytes == sum(len(raw) for _, _, raw in stored.values())
            assert len(checkpoint.fingerprint) == 64
    except CheckpointFormatError as error:
        _check_words(error)


def _check_tensors(checkpoint: Checkpoint) -> set[str]:
    """Check that every tensor reads the same whole and in parts; return the readable names."""
    readable = set()
    for name, handle in checkpoint.items():
        assert handle.name == name
        try:
            whole = handle.read()
        except WeightReadError as error:
            _check_words(error)
            assert handle.dtype == torch.bool, "only a byte that is no bool cannot be read"
            continue
        readable.add(name)
        assert (whole.shape, whole.dtype) == (handle.shape, handle.dtype)
        begin, end = handle.byte_range
        assert end - begin >= handle.nbytes
        for dim, size in enumerate(handle.shape[:3]):
            half = size // 2
            parts: list[FileHandle] = [
                handle.narrow(dim, 0, half),
                handle.narrow(dim, half, size - half),
            ]
            for part, start in zip(parts, (0, half), strict=True):
                expected = whole.narrow(dim, start, part.shape[dim])
                assert _bytes(part.read()) == _bytes(expected)
    return readable


def _by_the_library(files: list[bytes]) -> dict[str, tuple[str, list[int], bytes]]:
    """Read the files with the reference; an exception means that we accept what it refuses."""
    found = {}
    for data in files:
        for name, tensor in safetensors.deserialize(data):
            found[name] = (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"]))
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def _check_words(error: Exception) -> None:
    words = str(error)
    words.encode()
    assert words.isprintable(), ascii(words)
    assert len(words) < MOST_WORDS, words[:200]


def _check_lines(error: Exception) -> None:
    """Check words that may quote a library's message, of several lines."""
    words = str(error)
    assert all(line.isprintable() for line in words.split("\n")), ascii(words)
    assert len(words) < MOST_WORDS, words[:200]


@contextmanager
def _only_inside(folder: Path) -> Iterator[None]:
    """Fail if any file outside of ``folder`` is opened."""
    global _hooked
    if not _hooked:  # an audit hook cannot be removed
        sys.addaudithook(_on_event)
        _hooked = True
    _watched.append(os.path.realpath(folder))
    try:
        yield
    finally:
        _watched.clear()


def _on_event(event: str, args: tuple[object, ...]) -> None:
    if _watched and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(args[0]))
        if _IMPORTED.search(path) or os.path.isdir(path):
            return
        if path.startswith(_INSTALLED):  # such as a version, which transformers looks up
            return
        assert path.startswith(_watched[0] + os.sep), f"{path} was opened"


KINDS: dict[str, Callable[[Path, bytes], None]] = {
    "file": check_file,
    "folder": check_folder,
    "config": check_config,
    "torch": check_torch,
    "npcache": check_npcache,
    "gguf": check_gguf,
    "dcp": check_dcp,
    "layout": check_layout,
    "manifest": check_manifest,
    "quant_state": check_quant_state,
    "http": runpy.run_path(str(Path(__file__).with_name("http_answers.py")))["check_http"],
    "request": runpy.run_path(str(Path(__file__).with_name("request_bodies.py")))["check_request"],
}

"""The tensors of a GGUF file under Hugging Face's names, and opening the parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.gguf.header import FLOAT_BYTES, GGUFHeader, GGUFTensor, read_gguf_header
from vllm_module.weights.gguf.names import (
    ARCHITECTURES,
    ROPE_TENSORS,
    Architecture,
    is_dequantized,
    is_norm,
    is_of_heads,
    is_turned,
    renamed,
)
from vllm_module.weights.header import DAMAGED, DTYPES, Entry
from vllm_module.weights.readable import Readable
from vllm_module.weights.weight_file import WeightFile

if TYPE_CHECKING:
    import torch

    from vllm_module.weights.handle import FileHandle

_MOST_EXPERTS = _MOST_FACTORS = 1 << 16
# Limit on tensors of the model per file: one stored tensor may hold many experts.
_MOST_TENSORS = 1 << 19
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile(WeightFile):
    """The tensors of one GGUF file, by Hugging Face's names.

    A weight in blocks is uint8 ``[rows, blocks, bytes]``, and its name ends with its type:
    ``q_proj.weight_q4_k``. So blocks of one type are never taken for those of another. The experts
    of a layer, which the file stores as one tensor, become one tensor each. Gates and the keys of
    latent attention (stored transposed) are dequantized while they are read. The 1 that llama.cpp
    adds to the norm weights of Gemma is subtracted.

    ``first`` is the first part of a split file, which has the metadata of all parts.
    """

    header: GGUFHeader

    def __init__(self, path: Path, file_bytes: Readable, first: GGUFFile | None = None) -> None:
        self._first = first
        super().__init__(path, file_bytes=file_bytes)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Keys and values of this file, or of the first part of a split file."""
        # A part is false, as an empty mapping is, if it has no tensors.
        return (self if self._first is None else self._first).header.metadata

    def _read_entries(self) -> None:
        self.header = read_gguf_header(self.path, self._bytes.size, self._bytes.read_bytes)
        where = printable(self.path)
        named = self.metadata.get("general.architecture")
        # Tensors of an unknown architecture keep the file's names, so that they can be listed.
        architecture = ARCHITECTURES.get(str(named), Architecture({}))
        self.entries = {}
        self.kinds: dict[str, str] = {}  # block types of weights, by name
        self.rope_tensors: dict[str, GGUFTensor] = {}
        self._offsets: set[str] = set()  # names of norm weights stored with 1 added
        self._turned: set[str] = set()  # names of weights whose heads are stored transposed
        for tensor in self.header.tensors:
            if tensor.name in ROPE_TENSORS:
                self.rope_tensors[tensor.name] = tensor
                continue
            for name, entry in self._entries(tensor, architecture):
                if name in self.entries:
                    raise CheckpointFormatError(
                        f"{where}: two tensors would be called {shorten(name)}, one of them "
                        f"{shorten(tensor.name)}. {DAMAGED}"
                    )
                self.entries[name] = entry
                if tensor.kind in BLOCK_TYPES:
                    self.kinds[name] = tensor.kind
                if architecture.norms_plus_one and is_norm(tensor.name):
                    self._offsets.add(name)
                if is_turned(tensor.name):
                    self._turned.add(name)

    def _entries(self, tensor: GGUFTensor, architecture: Architecture) -> list[tuple[str, Entry]]:
        if is_turned(tensor.name) and len(tensor.shape) != 3:
            self._refuse(
                f"tensor {shorten(tensor.name)} should have the dimensions heads, latent and "
                f"features, and its shape is {list(tensor.shape)}: convert the model with llama.cpp"
            )
        if "*" in renamed(tensor.name, architecture):
            metadata = self.metadata
            experts = metadata.get(f"{metadata['general.architecture']}.expert_count")
            shape = tensor.shape
            if len(shape) < 2 or shape[0] > _MOST_EXPERTS or experts not in (None, shape[0]):
                count = f"at most {_MOST_EXPERTS}" if experts is None else shorten(experts)
                raise CheckpointFormatError(
                    f"{printable(self.path)}: tensor {shorten(tensor.name)} should have the "
                    f"weights of {count} experts, and its shape is {list(shape)}. {DAMAGED}"
                )
            if len(self.entries) + shape[0] > _MOST_TENSORS:
                raise CheckpointFormatError(
                    f"{printable(self.path)}: with the {shape[0]} experts of tensor "
                    f"{shorten(tensor.name)} it has more than {_MOST_TENSORS} tensors, the most "
                    f"that are accepted. {DAMAGED}"
                )
        return _entries(tensor, architecture)

    def _described(self) -> list[tuple[int, int]]:
        return [(0, self.header.start)]

    def floats(self, tensor: GGUFTensor) -> list[float]:
        """Read a small tensor of the file."""
        import torch  # here because headers are read without it

        if (
            tensor.kind not in FLOAT_BYTES
            or len(tensor.shape) != 1
            or tensor.shape[0] > _MOST_FACTORS
        ):
            raise CheckpointFormatError(
                f"{printable(self.path)}: tensor {shorten(tensor.name)} should be a vector of at "
                f"most {_MOST_FACTORS} floats, and is {tensor.kind} {list(tensor.shape)}. {DAMAGED}"
            )
        data = bytearray(self._bytes.read_bytes(tensor.begin, tensor.end - tensor.begin))
        values = torch.frombuffer(data, dtype=getattr(torch, DTYPES[tensor.kind].name))
        return [float(value) for value in values.tolist()]

    def __getitem__(self, name: str) -> FileHandle:
        handle = super().__getitem__(name)
        offset = name in self._offsets
        if (kind := self.kinds.get(name)) is not None and name.endswith(f".{_attribute(kind)}"):
            return handle
        turned = name in self._turned
        if kind is None and not offset and not turned:
            return handle
        # Imported here because headers are read without torch.
        import torch

        from vllm_module.kernels.matmul.gguf_blocks import dequantize_blocks
        from vllm_module.weights.computed_handle import ComputedHandle
        from vllm_module.weights.gguf.turned_handle import TurnedHandle

        def compute(stored: torch.Tensor) -> torch.Tensor:
            values = stored.float() if kind is None else dequantize_blocks(stored, kind)
            return values - 1 if offset else values

        shape = handle.shape
        if kind is not None:
            shape = torch.Size((*shape[:-2], shape[-2] * BLOCK_TYPES[kind].values))
        return (TurnedHandle if turned else ComputedHandle)(handle, compute, shape, torch.float32)


def _attribute(kind: str) -> str:
    return f"weight_{kind.lower()}"


def _entries(tensor: GGUFTensor, architecture: Architecture) -> list[tuple[str, Entry]]:
    """Return the names and entries of the model's tensors that a tensor of the file holds."""
    name, shape, (_, _, kind, begin, end) = renamed(tensor.name, architecture), tensor.shape, tensor
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # tools of llama.cpp drop dimensions of one
    if is_of_heads(tensor.name) and not is_turned(tensor.name) and len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    dtype = DTYPES["U8" if kind in BLOCK_TYPES else kind]
    if kind in BLOCK_TYPES:
        values, nbytes = BLOCK_TYPES[kind]
        shape = (*shape[:-1], shape[-1] // values, nbytes)
        if not is_dequantized(tensor.name) and len(tensor.shape) > 1:
            name = f"{name.removesuffix('weight')}{_attribute(kind)}"
    if "*" not in name:
        return [(name, Entry(dtype, shape, begin, end))]
    step = (end - begin) // shape[0]
    return [
        (
            name.replace("*", str(expert)),
            Entry(dtype, shape[1:], begin + expert * step, begin + (expert + 1) * step),
        )
        for expert in range(shape[0])
    ]


def open_gguf_files(folder: FolderFiles) -> tuple[GGUFFile, ...]:
    """Open a GGUF file, or all parts of a split one, and check their entries of tensors.

    The folder's user may have named a file, any part of a split one, or a folder with one model. A
    part that is missing, or belongs to another model, is a CheckpointFormatError.
    """
    name = find_gguf(folder) if folder.named is None else folder.named
    names = [name]
    if (split := _PART.fullmatch(name)) is not None:
        stem, _, count = split.groups()
        parts = range(1, int(count) + 1)
        names = [f"{stem}-{number:05d}-of-{count}.gguf" for number in parts] or names
    for each in names:
        if split is not None and not folder.has(each):
            raise CheckpointFormatError(
                f"{printable(folder.path / each)} is not there, a part of a model in {len(names)} "
                "files: download it too"
            )
    with ExitStack() as opened:
        files: list[GGUFFile] = []
        for each in names:
            first = files[0] if files else None
            files.append(GGUFFile(folder.path / each, folder.open(each), first))
            opened.callback(files[-1].close)
        _check_parts(files)
        opened.pop_all()
    return tuple(files)


def _check_parts(files: list[GGUFFile]) -> None:
    """Raise unless the files are the parts of one model, each once and in order."""
    for number, file in enumerate(files):
        for key, expected in (("split.no", number), ("split.count", len(files))):
            got = file.header.metadata.get(key, expected if len(files) == 1 else None)
            if got != expected and not (key == "split.count" and got == 0 and len(files) == 1):
                raise CheckpointFormatError(
                    f"{printable(file.path)}: {key} should be {expected}, and is {shorten(got)}: "
                    "the file is part of another model, or was renamed; download it again"
                )
    total = sum(len(file.header.tensors) for file in files)
    expected = files[0].metadata.get("split.tensors.count", total)
    if expected != total:
        raise CheckpointFormatError(
            f"{printable(files[0].path)}: split.tensors.count is {shorten(expected)}, and its "
            f"{len(files)} files have {total} tensors: download the model again"
        )


def find_gguf(folder: FolderFiles) -> str:
    """Return the name of the GGUF file in a folder, or of the first part of a split one.

    A folder with none, or with several models, is a CheckpointFormatError.
    """
    where, listed = printable(folder.path), folder.names()
    if listed is None:
        raise CheckpointFormatError(
            f"{where}: the server does not list its files, so a GGUF file has to be named: add "
            "/NAME.gguf"
        )
    models: dict[str, str] = {}
    for name in listed:
        if PurePath(name).suffix == ".gguf":
            split = _PART.fullmatch(name)
            models.setdefault(name if split is None else f"{split[1]} of {split[3]}", name)
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        raise CheckpointFormatError(f"{where} holds no *.gguf file; check the path")
    shown = ", ".join(map(printable, list(models.values())[:20]))
    raise CheckpointFormatError(
        f"{where} holds several models in GGUF files: {shown}. Name the one to load by its path"
    )

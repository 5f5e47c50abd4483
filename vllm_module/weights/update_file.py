"""Updates of weights as files, from a trainer that shares no network with the engine.

An update is one safetensors file. A tensor that is sent whole is in it under its own name. Of some
elements of a tensor it has two others: the steps from an index to the next, and the values. Its
metadata has a JSON object under ``update``: the names of the weights after it and before it, the
shapes of such tensors, and digests of what is stored. One file is there at once or not at all,
after a rename in a folder and as an object in a store.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from vllm_module.base.messages import describe_error, printable, printable_name, shorten
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.changes import Changes
from vllm_module.weights.digests import digest_weight, is_part
from vllm_module.weights.formats import SAFETENSORS
from vllm_module.weights.handle import Weight
from vllm_module.weights.header import DAMAGED, MAX_NAME
from vllm_module.weights.packing import GAPS, gaps, gaps_of, indices_of
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.reading import read_all
from vllm_module.weights.safetensors import are_sizes
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored
from vllm_module.weights.source import find_source, open_weights
from vllm_module.weights.strict_json import parse_object

_KEY = "update"


def write_update(
    path: str | Path,
    weights: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    version: str,
    after: str | None = None,
    digests: bool = False,
) -> None:
    """Write an update of weights as a file, which an engine takes by :func:`open_update`.

    The file is there when it is whole, in a folder and in a store. It replaces one of the same
    name.

    Args:
        path: of the file, which ends with ``.safetensors``, or its URL in a bucket (``s3://``,
            ``gs://``, ``az://``). It is uploaded from this machine's temporary files.
        weights: a mapping, or pairs of name and tensor, handle or ``Changes`` (see
            :func:`find_changes`). All are held until the file is written. For a DTensor, pass its
            ``full_tensor()``.
        version: name of the weights after the update.
        after: the ``weight_version`` of engines that may take it; others refuse it. ``Changes``
            need one. Without it, any engine takes the update.
        digests: store a digest of each tensor, which engines compare with what they read.

    Raises:
        ValueError: a name comes twice or is none for a file, ``after`` is missing, or the path has
            another suffix or is the URL of something else.
        WeightReadError: a tensor has a NaN or no dense data, or indices of ``Changes`` are wrong.
        OSError: the file cannot be written.
        MissingPackageError: buckets need the extra ``stores``.

    """
    if not os.fspath(path).endswith(SAFETENSORS.suffixes):
        raise ValueError(f"path should end with .safetensors, got {printable(path)}")
    if not isinstance(version, str) or not isinstance(after, str | None):
        raise ValueError(f"version and after should be text, got {version!r} and {after!r}")
    parts: dict[str, Weight] = {}
    shapes: dict[str, list[int]] = {}
    seen: set[str] = set()
    for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
        of_name = {name: weight}
        if not isinstance(name, str):
            raise ValueError(f"the name of a tensor should be text, got {shorten(name)}")
        if name == "__metadata__" or name != name.encode(errors="replace").decode():
            raise ValueError(f"{printable_name(name)} cannot be the name of a tensor in a file")
        if isinstance(weight, Changes):
            if problem := weight.problem():
                raise WeightReadError(f"{printable_name(name)}: {problem}")
            if after is None:
                raise ValueError(
                    f"some elements of {printable_name(name)} are sent, which need the others of "
                    "an engine: pass after=, the version of its weights"
                )
            shapes[name] = list(weight.shape)
            steps = gaps(weight.indices).to(gaps_of(weight))
            of_name = dict(zip(_stored_names(name), (steps, weight.values), strict=True))
        if max(map(len, of_name)) > MAX_NAME:
            raise ValueError(
                f"{printable_name(name)} cannot be the name of a tensor in a file, which has at "
                f"most {MAX_NAME} characters"
            )
        if seen & {name, *of_name}:
            raise ValueError(f"the tensor {printable_name(name)} comes twice")
        seen |= {name, *of_name}
        parts.update(of_name)
    sums = {name: digest_weight(part).hex for name, part in parts.items()} if digests else {}
    header = {"version": version, "after": after, "shapes": shapes, "digests": sums}
    stored = {name: Stored(part.dtype, tuple(part.shape)) for name, part in parts.items()}
    metadata = {_KEY: json.dumps(header)}
    with (
        _new_file(os.fspath(path)) as place,
        SafetensorsWriter(place, stored, aligned=True, metadata=metadata) as file,
    ):
        for name, part in parts.items():
            try:
                tensor = part if isinstance(part, torch.Tensor) else part.read()
                is_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
                if is_float and bool(tensor.isnan().any()):
                    raise WeightReadError(f"{printable_name(name)} has a NaN")
                file.write(name, tensor)
            except RuntimeError as error:  # torch's, which does not name the tensor
                raise WeightReadError(
                    f"{printable_name(name)} cannot be written; send a dense tensor with data, "
                    f"such as a DTensor's full_tensor(): {describe_error(error)}"
                ) from error


@contextmanager
def _new_file(path: str) -> Iterator[Path]:
    """Yield where to write a file; at the end of the block it gets its name, or is uploaded."""
    if "://" in path:
        from vllm_module.weights.stores.upload import uploading  # few trainers have a store

        with uploading(path) as local:
            yield local
        return
    out = Path(os.path.expanduser(path))
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")  # no suffix of weights
    try:
        yield temporary
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def open_update(path: str | Path) -> WeightUpdate:
    """Open an update for ``LLM.update_weights``, from a file, a folder, a hub id or a URL.

    ``with open_update("s3://bucket/step-7.safetensors") as update: llm.update_weights(update)``

    A checkpoint is an update, too, without a version. Elements are read here, and take 8 bytes
    beside each value; whole tensors are read when the engine needs them.

    Raises:
        CheckpointFormatError: nothing is there, or the file breaks the format.
        WeightReadError: bytes could not be read, or have another digest than was written.

    """
    opened = open_weights(find_source(os.fspath(path), described=False))
    try:
        return WeightUpdate(opened, printable_name(os.fspath(path)))
    except BaseException:
        opened.close()
        raise


class WeightUpdate(Mapping[str, Any]):
    """Handles of whole tensors, and ``Changes``, by name; made by :func:`open_update`.

    Attributes:
        version: name of the weights after it; ``None`` for a checkpoint.
        after: name of the weights before it; ``None`` if it is for any.
        digests: of whole tensors, if they were written.

    """

    def __init__(self, opened: OpenWeights, where: str) -> None:
        self._opened, self._where = opened, where
        self.version: str | None = None
        self.after: str | None = None
        self.digests: dict[str, str] = {}
        self._changes: dict[str, Changes] = {}
        self._names = list(opened)
        files = getattr(opened, "metadata", ())
        texts = [metadata[_KEY] for metadata in files if _KEY in metadata]
        if texts and len(files) > 1:
            self._refuse(f"an update is one file, and here are {len(files)}: name one of them")
        for text in texts:
            self._describe(text)

    def name_after(self, held: str, wanted: str | None) -> str | None:
        """Return the name of the weights of an engine after this update; ``None`` to count.

        Raises ``WeightReadError`` if the engine holds other weights than it changes, or if an
        update of another name is wanted.
        """
        if self.after is not None and held != self.after:
            raise WeightReadError(
                f"{self._where} changes the weights {shorten(self.after)}, and the engine has "
                f"{shorten(held)}: send the updates in order, or whole weights"
            )
        if None not in (wanted, self.version) and wanted != self.version:
            raise WeightReadError(
                f"{self._where} has the weights {shorten(self.version)}, and {shorten(wanted)} "
                "were asked for"
            )
        return self.version if wanted is None else wanted

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointFormatError(f"{self._where}: {problem}")

    def _describe(self, text: str) -> None:
        entries = parse_object(text.encode(), f"{self._where}: its update", DAMAGED)
        version, after, shapes, sums = map(entries.get, ("version", "after", "shapes", "digests"))
        if (
            len(entries) != 4
            or not isinstance(version, str)
            or not isinstance(after, str if shapes else str | None)
            or not (isinstance(shapes, dict) and all(map(are_sizes, shapes.values())))
            or not is_part(sums)
        ):
            self._refuse(
                "its update should have version and after (text), shapes by name and digests by "
                f"name, and is {shorten(text)}. {DAMAGED}"
            )
        if sums and sums.keys() != {*self._opened}:
            self._refuse(f"its digests should be of the tensors that it has. {DAMAGED}")
        self.version, self.after = version, after
        parts = self._read([each for name in shapes for each in _stored_names(name)], sums)
        for name, shape in shapes.items():
            if name in self._opened:
                self._refuse(f"{printable_name(name)} is there whole and in elements. {DAMAGED}")
            steps, values = (parts[each] for each in _stored_names(name))
            if steps.dtype not in GAPS:
                self._refuse(f"{printable_name(name)} has steps of {steps.dtype}. {DAMAGED}")
            self._changes[name] = changes = Changes(indices_of(steps), values, shape)
            if problem := changes.problem():
                self._refuse(f"{printable_name(name)}: {problem}. {DAMAGED}")
        whole = [name for name in self._opened if name not in parts]
        self.digests = {name: sums[name] for name in whole if sums}
        self._names = [*whole, *shapes]

    def _read(self, names: list[str], sums: Mapping[str, str]) -> dict[str, torch.Tensor]:
        for name in names:
            if name not in self._opened:
                self._refuse(f"its update needs the tensor {printable_name(name)}. {DAMAGED}")
        handles = {name: self._opened[name] for name in names}
        parts = {
            name: torch.empty(handle.shape, dtype=handle.dtype, device="cpu")
            for name, handle in handles.items()
        }
        read_all((handle, parts[name]) for name, handle in handles.items())
        for name, part in parts.items() if sums else ():
            if (got := digest_weight(part).hex) != sums[name]:
                raise WeightReadError(
                    f"{self._where}: {printable_name(name)} has the digest {got}, and {sums[name]} "
                    f"was written. {DAMAGED}"
                )
        return parts

    def close(self) -> None:
        """Close the files; handles can no longer be read."""
        self._opened.close()

    def __enter__(self) -> WeightUpdate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stored_names(name: str) -> tuple[str, str]:
    """Return the names under which steps and values of elements are stored."""
    return f"steps/{name}", f"values/{name}"

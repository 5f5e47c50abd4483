"""Reading the index of a checkpoint in several files, which maps tensors to files."""

from __future__ import annotations

from pathlib import Path

from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.regular_file import read_file
from vllm_module.weights.strict_json import parse_object
from vllm_module.weights.weight_file import WeightFile

DAMAGED = "The checkpoint is damaged or incomplete: download it again."


def read_index(index: Path, suffixes: tuple[str, ...]) -> dict[str, set[str]]:
    """Parse the index; return the names of tensors by the name of their file."""
    return parse_index(read_file(index, index.parent), index, suffixes)


def parse_index(data: bytes, index: Path, suffixes: tuple[str, ...]) -> dict[str, set[str]]:
    """Parse an index as :func:`read_index` does; ``index`` is for messages."""
    where = printable(index)
    weight_map = parse_object(data, where, DAMAGED).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(
            f"{where}: weight_map should map names of tensors to files, and is "
            f"{shorten(weight_map)}. {DAMAGED}"
        )
    names_in: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file in names_in:
            names_in[file].add(name)
            continue
        # The file may be a link, as in Hugging Face's cache, but its name may not lead out of the
        # folder. \ separates folders on Windows, and : follows a drive.
        is_plain = isinstance(file, str) and not set(file) & set("/\\:\0")
        if not is_plain or not file.endswith(suffixes):
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} should be in a {suffixes[0]} file of the same "
                f"folder, and is in {shorten(file)}; do not load it unless you trust its author"
            )
        names_in[file] = {name}
    return names_in


def check_against_index(index: Path, names_in: dict[str, set[str]], file: WeightFile) -> None:
    """Raise if a file's tensors are not exactly those that the index lists for it."""
    expected, where = names_in[file.path.name], printable(file.path)
    names = file.entries.keys()  # comparing Mappings with their own __eq__ is slow
    for name in sorted(names - expected):
        owner = next((other for other, names in names_in.items() if name in names), None)
        indexed = "does not know it" if owner is None else f"says it is in {printable_name(owner)}"
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)} is here, and {index.name} {indexed}. {DAMAGED}"
        )
    for name in sorted(expected - names):
        raise CheckpointFormatError(
            f"{printable(index)}: tensor {shorten(name)} should be in "
            f"{printable_name(file.path.name)}, and is not. {DAMAGED}"
        )

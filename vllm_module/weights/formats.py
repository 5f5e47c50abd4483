"""Table of file formats: how a folder's format is recognized, and the function that opens it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_module.base.load_formats import LoadFormat
from vllm_module.base.messages import shorten

if TYPE_CHECKING:
    from vllm_module.weights.folder_files import FolderFiles

_NONE = re.compile("$.")  # matches nothing


@dataclass(frozen=True)
class Files:
    """A format whose files are opened one by one.

    Attributes:
        opener: ``module:name`` of the :class:`WeightFile` that opens one. It is imported when it is
            called, with the file and the folder that a link may not lead out of.
        suffixes: of its files. All with the first of these that the folder has are opened,
        others: except these, which hold something else.
        index: the file that names them by tensor; it is looked for first,
        whole: and then the one file that has all tensors.

    """

    opener: str
    suffixes: tuple[str, ...]
    others: re.Pattern[str] = _NONE
    index: str | None = None
    whole: str | None = None

    @property
    def patterns(self) -> list[str]:
        """File names of this format, for messages."""
        return [f"*{suffix}" for suffix in self.suffixes]

    def is_in(self, folder: FolderFiles) -> bool:
        """Return whether the folder has files of this format."""
        if any(name is not None and folder.has(name) for name in (self.index, self.whole)):
            return True
        return bool(self.files(map(Path, folder.names() or ())))

    def is_left_over(self, indexed: Iterable[str], has: Callable[[str], bool]) -> bool:
        """Return whether an index is of an earlier save: ``has`` no file of it, but ``whole``.

        ``save_pretrained`` of transformers removes the files of one, and not the index itself.
        """
        return self.whole is not None and has(self.whole) and not any(map(has, indexed))

    def files(self, present: Iterable[Path]) -> list[Path]:
        """Return the files of this format among those in a folder."""
        present = list(present)
        for suffix in self.suffixes:
            found = [path for path in present if path.suffix == suffix]
            if kept := [path for path in found if not self.others.match(path.name)]:
                return kept
        return []


@dataclass(frozen=True)
class Unit:
    """A format whose folder is opened as one.

    Attributes:
        opener: ``module:name`` of a function from :class:`FolderFiles` to a :class:`Checkpoint`. It
            is imported on first use.
        marker: the file by which the format is recognized, relative to the folder; or ``*`` and a
            suffix, and then one such file may be opened instead of the folder.
        made_from: the format that ``opener`` converts if this one is asked for and not there.
        weights: patterns of the files on the hub that hold weights and are downloaded.
        small_files: ``module:name`` of a function from :class:`FolderFiles` to the files in Hugging
            Face's layout, such as ``config.json``, that folders of this format lack.
        only_here: reason why the files must be on this machine; None if they need not.

    """

    opener: str
    marker: str
    made_from: str | None = None
    weights: tuple[str, ...] = ()
    small_files: str | None = None
    only_here: str | None = None

    @property
    def patterns(self) -> list[str]:
        """File names of this format, for messages."""
        return [self.marker]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffix of its files, if it is recognized by one."""
        return (self.marker[1:],) if self.marker.startswith("*") else ()

    def is_in(self, folder: FolderFiles) -> bool:
        """Return whether the folder has this format."""
        if self.suffixes:
            return any(name.endswith(self.suffixes) for name in folder.names() or ())
        return folder.has(self.marker)


SAFETENSORS = Files(
    "vllm_module.weights.safetensors:SafetensorsFile",
    (".safetensors",),
    re.compile(r"consolidated|model-rank-\d+-part-"),
    "model.safetensors.index.json",
    "model.safetensors",
)
# Keys are the names in load_formats.LoadFormat; "auto" takes the first that a folder has. Left out
# are Mistral's consolidated* (the same weights under other names), model-rank* (one rank's tensors,
# in another order than a checkpoint's tensors of the same shape) and the states that trainers write
# beside the weights.
FORMATS: dict[str, Files | Unit] = {
    "sharded_state": Unit(
        "vllm_module.weights.sharded_state:ShardedState",
        "sharded_state.json",
        weights=("model-rank-*",),
    ),
    "safetensors": SAFETENSORS,
    "pt": Files(
        "vllm_module.weights.pickled.torch_file:TorchFile",
        (".bin", ".pt"),
        re.compile(
            "consolidated|training_args|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state"
            r"|meta\.pt$"  # what Lightning writes beside the files of dcp
        ),
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
    ),
    "npcache": Unit(
        "vllm_module.weights.npcache:open_npcache",
        "np/weight_names.json",
        made_from="pt",
        only_here="each tensor is a file of its own, and missing ones are written beside the rest",
    ),
    "gguf": Unit(
        "vllm_module.weights.gguf.small_files:open_gguf",
        "*.gguf",
        weights=("*.gguf",),
        small_files="vllm_module.weights.gguf.small_files:gguf_small_files",
    ),
    "mistral": Unit(
        "vllm_module.weights.mistral:open_mistral",
        "params.json",
        weights=("consolidated*",),
        small_files="vllm_module.weights.mistral:mistral_small_files",
    ),
    "dcp": Unit(
        "vllm_module.weights.pickled.dcp:open_dcp",
        ".metadata",
        weights=(".metadata", "*.distcp"),
        only_here="each chunk of a tensor is an archive, which takes several requests to read",
    ),
}
UNSUPPORTED = (".ckpt", ".h5", ".msgpack", ".npz", ".pth")  # suffixes of other formats


def formats_of(load_format: str) -> list[str]:
    """Return the formats of files that a ``load_format`` of ``LoadConfig`` stands for.

    Raises ``ValueError`` if it is unknown, or has no files.
    """
    if load_format in FORMATS:
        return [load_format]
    if load_format in ("auto", "layered"):
        return list(FORMATS)
    names = get_args(LoadFormat)
    if load_format not in names:
        raise ValueError(
            f"load_format {shorten(load_format)} is unknown: expected {', '.join(names)}"
        )
    raise ValueError(
        f"load_format {load_format!r} has no files to open: its values are made for a model, by "
        "get_model, LLM, and the commands load and plan"
    )


def imported(opener: str) -> Callable[..., Any]:
    """Import the object that ``module:name`` names."""
    module, _, name = opener.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found

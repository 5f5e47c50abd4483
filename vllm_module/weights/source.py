"""Finding a model's files: a folder, a hub id, or a URL of a registered scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.base.outside import blamed
from vllm_module.errors import NOT_THEIRS, CheckpointFormatError
from vllm_module.weights.hub import download, patterns_of
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.stores.place import SCHEMES
from vllm_module.weights.written_folder import write_folder

if TYPE_CHECKING:
    from vllm_module.weights.checkpoint import Checkpoint
    from vllm_module.weights.handle import Weight
    from vllm_module.weights.pairs import OpenWeights


class Source(Protocol):
    """The place a model comes from: a folder with its small files, and its weights."""

    @property
    def folder(self) -> Path:
        """A local folder with ``config.json`` and the files of the tokenizer."""

    def weights(self) -> Mapping[str, Weight] | Iterable[tuple[str, Weight]]:
        """Open the weights: pairs of name and :class:`Handle`, in any order, each name once.

        No handle is read before all names are known, so a source should not yield tensors that it
        has read itself. This is called each time the model is loaded, by each rank, and by
        ``plan``. If the result has a method ``close``, it is called once the handles are no longer
        needed.
        """


def open_weights(source: Source) -> OpenWeights:
    """Open the weights of ``source``: a :class:`Checkpoint`, or its pairs as a mapping like one."""
    # Imported here because headers of files are read without torch, which pairs need.
    from vllm_module.weights.checkpoint import Checkpoint

    opened = source.weights()
    if isinstance(opened, Checkpoint):
        return opened
    from vllm_module.weights.pairs import PairsCheckpoint

    whose = source.whose if isinstance(source, Remote) else None
    return PairsCheckpoint(source.folder, opened, whose)


@dataclass(frozen=True)
class Folder:
    """The source that needs no registration: a folder, or one file of weights.

    Attributes:
        folder: a folder with ``config.json`` and the files of the tokenizer. If the weights are in
            a format whose folders lack them, it was written when the model was found: it is among
            the system's temporary files until this process ends, and other processes that it
            starts, such as ranks, find it there.
        load_format: the format of the weights.
        weights_path: the folder or file with the weights, if it is another one.

    """

    folder: Path
    load_format: str = "auto"
    weights_path: Path | None = None

    @property
    def path(self) -> Path:
        """The folder or file with the weights, which messages name."""
        return self.weights_path or self.folder

    def weights(self) -> Checkpoint:
        """Open the files of weights and check their headers."""
        # Imported here because registering a source needs no torch.
        from vllm_module.weights.checkpoint import open_checkpoint

        return open_checkpoint(self.weights_path or self.folder, self.load_format)


Opener = Callable[[str], Source]


class Remote:
    """The source that ``opener`` returns for ``url``; another process opens it again.

    Raises ``CheckpointFormatError`` if the opener fails, or returns no :class:`Source`.

    Attributes:
        whose: the source in messages about its failures.

    """

    def __init__(self, url: str, opener: Opener) -> None:
        self._url, self._opener = url, opener
        self.whose = f"the source {printable_name(url)}"
        with blamed(
            f"the opener of {printable_name(url)} fails", CheckpointFormatError, NOT_THEIRS
        ):
            source: Any = opener(url)
            folder, weights = getattr(source, "folder", None), getattr(source, "weights", None)
        if not isinstance(folder, Path) or weights is None:
            raise CheckpointFormatError(
                f"the opener of {printable_name(url)} should return an object with folder, a "
                f"pathlib.Path, and weights(), got {shorten(source)}"
            )
        self.folder: Path = folder
        self._weights = weights

    def weights(self) -> Mapping[str, Weight] | Iterable[tuple[str, Weight]]:
        """Open the source's weights."""
        with blamed(f"{self.whose} fails", CheckpointFormatError, NOT_THEIRS):
            opened: Mapping[str, Weight] | Iterable[tuple[str, Weight]] = self._weights()
        return opened

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self._url, self._opener)


registered_sources: dict[str, Opener] = {}  # openers by scheme
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def register_source(scheme: str, opener: Opener) -> None:
    """Register ``opener`` for URLs ``scheme://...``, wherever a model is named.

    Args:
        scheme: letters, digits, ``+``, ``-`` and ``.``, such as ``"s3"``.
        opener: called with the whole URL; returns a :class:`Source`. Ranks in processes of their
            own call it too, so it has to be defined at the top level of a module.

    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ValueError(f"scheme should be a word such as 's3', without '://', got {scheme!r}")
    if not callable(opener):
        raise TypeError(f"the opener of {scheme} should be called with a URL, got {opener!r}")
    registered_sources[scheme.lower()] = opener


def find_source(
    model: str,
    revision: str | None = None,
    *,
    load_format: str = "auto",
    download_dir: str | None = None,
    token: str | bool | None = None,
    code: bool = False,
    described: bool = True,
) -> Source:
    """Return the source of ``model``: a URL, a folder, or a hub id, which is downloaded.

    ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` and ``hf://`` are built in; a
    registered opener replaces a built-in one. ``load_format`` is that of ``LoadConfig``; a
    registered opener ignores it. ``download_dir``, ``token`` and ``code`` are those of
    :func:`resolve`; for a URL, no code is fetched. With ``"dummy"``, no weights are downloaded.
    Without ``described``, configuration and tokenizer from GGUF or Mistral's files are not written
    to the source's folder; the opened checkpoint has the configuration.

    Raises ``CheckpointFormatError`` if it cannot be found.
    """
    scheme, separator, _ = model.partition("://")
    if not separator:
        folder = resolve(
            model,
            revision,
            load_format=load_format,
            download_dir=download_dir,
            token=token,
            code=code,
        )
        if not described:
            return Folder(folder, load_format)
        # Imported here because registering a source needs no torch.
        from vllm_module.weights.checkpoint import LocalFiles, format_of
        from vllm_module.weights.formats import FORMATS, Unit, imported

        wanted: str | None = load_format
        if load_format == "dummy":  # other files are skipped, unless they hold the config
            wanted = None if is_there(folder / "config.json") else "auto"
        name = format_of(folder, wanted) if wanted is not None else None
        found = FORMATS[name] if name is not None else None
        if name is not None and isinstance(found, Unit) and found.small_files is not None:
            files = imported(found.small_files)(LocalFiles(folder))
            return Folder(write_folder(files, printable(folder)), name, weights_path=folder)
        return Folder(folder, name or load_format)
    opener = registered_sources.get(scheme.lower())
    if opener is not None:
        return Remote(model, opener)
    if scheme.lower() not in SCHEMES:
        known = ", ".join(f"{each}://" for each in sorted({*registered_sources, *SCHEMES}))
        raise CheckpointFormatError(
            f"{printable_name(model)}: no source of the scheme {printable_name(scheme)}:// is "
            f"registered (known: {known}); add one with register_source"
        )
    # Imported here because local folders need none of it.
    from vllm_module.weights.stores.source import StoreSource

    return StoreSource(
        model,
        revision,
        load_format=load_format,
        download_dir=download_dir,
        token=token,
        described=described,
    )


def resolve(
    model: str,
    revision: str | None,
    *,
    load_format: str = "auto",
    download_dir: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
    code: bool = False,
) -> Path:
    """Return the local folder of ``model``: a path, or a Hugging Face hub id to download.

    A path that exists is returned unchanged, and ``revision`` (a branch, tag or commit of the hub)
    is ignored. ``download_dir`` replaces the hub's cache, and ``token`` the one that is stored.
    Weights are downloaded in the format ``load_format``. Without ``weights``, or with ``"dummy"``,
    only the small files are. With ``code``, Python files are too.

    Raises ``CheckpointFormatError``, with advice, if ``model`` neither exists nor can be
    downloaded, or has several models in GGUF files.
    """
    if (path := local_path(model)) is not None:
        return path
    patterns = patterns_of(load_format) if weights and load_format != "dummy" else []
    return download(model, revision, patterns, download_dir=download_dir, token=token, code=code)


def local_path(model: str) -> Path | None:
    """Return the path that ``model`` names; ``None`` if it is not there and may be a hub id.

    Raises ``CheckpointFormatError`` if it is not there and cannot be one.
    """
    path = Path(os.path.expanduser(model))
    if is_there(path, follow_links=True):
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointFormatError(f"the folder {printable(path)} does not exist; check the path")
    return None

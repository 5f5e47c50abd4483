"""A model whose checkpoint is in an object store or on the web."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, printable_name
from vllm_module.weights.formats import FORMATS, Files
from vllm_module.weights.index import check_against_index, read_index
from vllm_module.weights.regular_file import MAX_JSON_BYTES, is_there
from vllm_module.weights.stores import hub_client
from vllm_module.weights.stores.cache import StoreCache
from vllm_module.weights.stores.checkpoint import StoredCheckpoint, open_file
from vllm_module.weights.stores.client import Client
from vllm_module.weights.stores.http_client import web_client
from vllm_module.weights.stores.obstore_client import ObstoreClient
from vllm_module.weights.stores.place import BUCKETS, Place, StorePath, parse
from vllm_module.weights.stores.store import Store
from vllm_module.weights.written_folder import new_folder, write_file

# The formats whose files are read by ranges, in the order in which they are looked for.
_FORMATS = ("safetensors", "pt")
_CONFIG = "config.json"
_POOLING = "1_Pooling/config.json"
# Configuration, index and tokenizer: what is taken of a folder that can be listed.
_SMALL = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
# What is asked for, file by file, where it cannot.
_SMALL_NAMES = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "chat_template.jinja", "chat_template.json", "modules.json", _POOLING,
)  # fmt: skip
# Of the small files together. A checkpoint has some twenty, of less than 100 MB.
_MOST_FILES = 1000
_MOST_BYTES = 1 << 30
_LONGEST_NAME = 255  # bytes, of a file's name on this machine


class StoreSource:
    """The source of ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` and ``hf://``.

    The small files are fetched into a local folder, which is removed with the source; those of the
    hub are in its cache. Weights are read by ranges. Another process on this machine takes the
    folder, and opens the weights itself, for the hub at the same commit.

    Args:
        url: of the folder, or ``hf://owner/name@revision``.
        revision: of the hub.
        load_format: as in ``LoadConfig``; a store is read as safetensors or pt.
        download_dir: of the hub's small files, and of ranges of weights, which are kept with it
            only.
        token: of the hub.
        fetched: the folder of another source of this URL, which keeps it, and the files it listed.

    Raises ``CheckpointFormatError`` if the URL is not valid, nothing is there, or access is denied.

    """

    def __init__(
        self,
        url: str,
        revision: str | None = None,
        *,
        load_format: str = "auto",
        download_dir: str | None = None,
        token: str | bool | None = None,
        fetched: tuple[Path, list[str] | None] | None = None,
    ) -> None:
        self.place = parse(url, revision)
        if load_format not in (*_FORMATS, "auto", "layered", "dummy"):
            raise CheckpointFormatError(
                f"{printable(str(self.place))}: load_format {load_format!r} is read from a local "
                f"folder only, and {' and '.join(_FORMATS)} from a store too: download the "
                "checkpoint"
            )
        self._options: dict[str, Any] = {
            "load_format": load_format, "download_dir": download_dir, "token": token,
        }  # fmt: skip
        self._token = token
        self._listed: list[str] | None = None
        if fetched is not None:
            self.folder, self._listed = fetched
        elif self.place.scheme == "hf":
            self.folder = hub_client.small_files(self.place, download_dir=download_dir, token=token)
            commit = self.folder.name
            self.place = Place("hf", self.place.host, self.place.folder, commit)
        else:
            self.folder = new_folder(printable(str(self.place)), self)
            self._fetch_small()

    def __reduce__(self) -> tuple[Callable[..., StoreSource], tuple[Any, ...]]:
        return _open_again, (str(self.place), self._options, self.folder, self._listed)

    def __repr__(self) -> str:
        return f"StoreSource({str(self.place)!r})"

    @property
    def path(self) -> StorePath:
        """A path that stands for the URL, in messages and reports."""
        return StorePath(str(self.place))

    def weights(self) -> StoredCheckpoint:
        """Open the weights: read and check the headers of all files, many at once.

        As in a local folder, an index is looked for first; safetensors go before pt.
        """
        names_in: dict[str, set[str]] | None = None
        indexes = {name: self.folder / str(_files(name).index) for name in self._formats()}
        load_format = next((name for name, path in indexes.items() if is_there(path)), None)
        store = Store(self.place, self._client(), self._cache())
        with ExitStack() as opened:
            opened.callback(store.close)
            if load_format is not None:
                names_in = read_index(indexes[load_format], _files(load_format).suffixes)
                names = sorted(names_in)
            else:
                load_format, names = self._files_of_weights(store)
            files = store.together(partial(open_file, store, name, load_format) for name in names)
            for file, _ in files if names_in is not None else ():
                check_against_index(indexes[load_format], names_in or {}, file)
            checkpoint = StoredCheckpoint(store, files, load_format)
            opened.pop_all()
        return checkpoint

    def _client(self) -> Client:
        if self.place.scheme in BUCKETS:
            return ObstoreClient(self.place)
        if self.place.scheme == "hf":
            return hub_client.hub_client(self.place, self._token)
        return web_client(self.place)

    def _cache(self) -> StoreCache | None:
        folder = self._options["download_dir"]
        if folder is None:
            return None
        # The services' libraries read endpoints there, and a bucket of one is not that of another.
        endpoints = [
            (name, value)
            for name, value in sorted(os.environ.items())
            if re.fullmatch(r"(AWS|AZURE|GOOGLE|HF)_.*(ENDPOINT|BASE_URL).*", name, re.IGNORECASE)
        ]
        return StoreCache(Path(folder), repr(endpoints))

    def _fetch_small(self) -> None:
        """Fetch the small files into the folder."""
        store = Store(self.place, self._client())
        try:
            listed = self._listed = store.names()
            if listed is None:
                names: Iterable[str] = (*_SMALL_NAMES, *self._indexes())
            else:
                wanted = filter(_is_small, listed)
                others = (name for name in listed if name.endswith(".index.json"))
                names = [name for name in wanted if name not in {*others} - {*self._indexes()}]
                if "modules.json" in listed:
                    names.append(_POOLING)
            if listed is not None and _CONFIG not in listed:
                there = ", ".join(map(printable_name, sorted(listed)[:20])) or "nothing"
                raise CheckpointFormatError(
                    f"{printable(str(self.place))} has no {_CONFIG}; there is {there}. Check the "
                    "URL: it should be that of the checkpoint's folder"
                )
            rest = [name for name in names if name != _CONFIG]
            if len(rest) >= _MOST_FILES:
                raise CheckpointFormatError(
                    f"{printable(str(self.place))} has {len(rest) + 1} files of configuration and "
                    f"tokenizer, and at most {_MOST_FILES} are fetched: take out those that are "
                    "not of the model"
                )
            # First, because its refusal tells whether anything is there.
            self._keep(_CONFIG, store.fetch(_CONFIG, MAX_JSON_BYTES))
            room, lock = _MOST_BYTES, threading.Lock()

            def fetch(name: str) -> None:
                nonlocal room
                data = store.fetch_optional(name, MAX_JSON_BYTES)
                if data is None:
                    return
                with lock:
                    room -= len(data)
                if room < 0:
                    raise CheckpointFormatError(
                        f"{printable(str(self.place))}: its files of configuration and tokenizer "
                        f"have more than {_MOST_BYTES} bytes together: take out those that are "
                        "not of the model"
                    )
                self._keep(name, data)

            store.together(partial(fetch, name) for name in rest)
        finally:
            store.close()

    def _keep(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data, printable(str(self.place)))

    def _formats(self) -> list[str]:
        """Return the names of the formats that are looked for."""
        asked = self._options["load_format"]
        return [asked] if asked in _FORMATS else [*_FORMATS]

    def _indexes(self) -> list[str]:
        return [str(_files(name).index) for name in self._formats()]

    def _files_of_weights(self, store: Store) -> tuple[str, list[str]]:
        """Return the format and the names of the files of weights, where no index has them."""
        listed = self._listed
        if self.place.scheme == "hf":
            listed = hub_client.names(self.place, self._token)
        formats = self._formats()
        if listed is None:
            there = [name for name in formats if len(formats) == 1 or store.has(_whole(name))]
            name = (there or formats)[0]  # which is refused where there is none
            return name, [_whole(name)]
        for name in formats:
            if _whole(name) in listed:
                return name, [_whole(name)]
            if found := _files(name).files(map(Path, sorted(listed))):
                return name, [path.name for path in found]
        wanted = " or ".join(pattern for name in formats for pattern in _files(name).patterns)
        names = ", ".join(map(printable_name, sorted(listed)[:20]))
        raise CheckpointFormatError(
            f"{printable(str(self.place))} holds no {wanted} file, the formats that are read from "
            f"a store; there is {names}. Download the checkpoint, or convert it"
        )


def _files(load_format: str) -> Files:
    format_ = FORMATS[load_format]
    assert isinstance(format_, Files)
    return format_


def _whole(load_format: str) -> str:
    return str(_files(load_format).whole)


def _is_small(name: str) -> bool:
    """Whether a file that is listed is wanted; a key of a bucket may be no name of a file."""
    possible = name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    return possible and any(fnmatch(name, pattern) for pattern in _SMALL)


def _open_again(
    url: str, options: dict[str, Any], folder: Path, listed: list[str] | None
) -> StoreSource:
    """Return a pickled source; on another machine it fetches the small files itself."""
    return StoreSource(url, **options, fetched=(folder, listed) if folder.is_dir() else None)

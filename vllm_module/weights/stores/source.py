"""A model whose checkpoint is in an object store or on the web."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from vllm_module.base.messages import printable, printable_name
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import hub
from vllm_module.weights.formats import FORMATS, SAFETENSORS, Files, Unit, formats_of, imported
from vllm_module.weights.index import check_against_index, read_index
from vllm_module.weights.regular_file import MAX_JSON_BYTES, is_there
from vllm_module.weights.stores import hub_client
from vllm_module.weights.stores.cache import StoreCache
from vllm_module.weights.stores.checkpoint import StoredCheckpoint, StoredFiles, open_file
from vllm_module.weights.stores.client import Client
from vllm_module.weights.stores.http_client import web_client
from vllm_module.weights.stores.obstore_client import ObstoreClient
from vllm_module.weights.stores.place import BUCKETS, REPLICA, Place, StorePath, parse, parse_file
from vllm_module.weights.stores.store import Store
from vllm_module.weights.written_folder import new_folder, write_file

# Why a format cannot be read from a store.
_ONLY_HERE = {
    name: each.only_here
    for name, each in FORMATS.items()
    if isinstance(each, Unit) and each.only_here is not None
}
_UNITS = [
    each for name, each in FORMATS.items() if isinstance(each, Unit) and name not in _ONLY_HERE
]
_SUFFIXES = (
    *SAFETENSORS.suffixes, *(suffix for each in _UNITS for suffix in each.suffixes)
)  # fmt: skip
_MARKERS = tuple(each.marker for each in _UNITS if not each.suffixes)
# Those of formats whose folder may lack config.json.
_DESCRIBING = tuple(each.marker for each in _UNITS if each.marker in _MARKERS and each.small_files)
_CONFIG = "config.json"
# Folders are listed without those below. These are the names that publishers use.
_TEMPLATES = tuple(hub.TEMPLATES.replace("*", name) for name in ("tool_use", "rag"))
# Small files that are asked for by name where the folder cannot be listed.
_SMALL_NAMES = (
    _CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "chat_template.jinja", "chat_template.json", "modules.json", hub.POOLING,
    *hub.SENTENCES, "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "digests.json", *_TEMPLATES,
)  # fmt: skip
# Of the small files together. A checkpoint has some twenty, of less than 100 MB.
_MOST_FILES = 1000
_MOST_BYTES = 1 << 30
_LONGEST_NAME = 255  # bytes, of a file's name on this machine


class StoreSource:
    """The source of ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` and ``hf://``.

    The small files are fetched into a local folder, which is removed with the source; those of the
    hub are in its cache. Where they lack what GGUF files or Mistral's say, they are written into
    another folder. Weights are read by ranges. Another process on this machine takes the folder,
    and opens the weights itself, for the hub at the same commit.

    Args:
        url: of the folder, or ``hf://owner/name@revision``; or of a GGUF or safetensors file in it.
        revision: of the hub.
        load_format: as in ``LoadConfig``; those that need the files on this machine are refused.
        download_dir: of the hub's small files, and of ranges of weights, which are kept with it
            only.
        token: of the hub.
        replica_token: of an engine's weights, instead of the environment's.
        described: as in ``find_source``.
        fetched: the folder of another source of this URL, which keeps it, the files it listed, and
            the format it found.

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
        replica_token: str | None = None,
        described: bool = True,
        fetched: tuple[Path, list[str] | None, str | None] | None = None,
    ) -> None:
        folder, self._named = parse_file(url, _SUFFIXES)
        self.place = parse(folder, revision)
        if (reason := _ONLY_HERE.get(load_format)) is not None:
            raise self._only_here(load_format, reason)
        self._options: dict[str, Any] = {
            "load_format": load_format, "download_dir": download_dir, "token": token,
            "replica_token": replica_token,
        }  # fmt: skip
        self._token = token
        self._listed: list[str] | None = None
        if fetched is not None:
            self.folder, self._listed, self._format = fetched
            return
        missing: CheckpointFormatError | None = None
        if self.place.scheme == "hf":
            self.folder = hub_client.small_files(self.place, download_dir=download_dir, token=token)
            commit = self.folder.name
            self.place = Place("hf", self.place.host, self.place.folder, commit)
        else:
            self.folder = new_folder(printable(str(self.place)), self)
            if described or not str(self._named).endswith(SAFETENSORS.suffixes):
                missing = self._fetch_small()
        self._format = self._find_format()
        found = FORMATS.get(self._format or "")
        if isinstance(found, Unit) and found.small_files is not None:
            if not described:
                return
            with closing(Store(self.place, self._client(), self._cache())) as store:
                files = imported(found.small_files)(self._files(store))
            self.folder = new_folder(str(self), self)
            for name, data in files.items():
                write_file(self.folder / name, data, str(self))
        elif missing is not None:
            raise missing

    def __reduce__(self) -> tuple[Callable[..., StoreSource], tuple[Any, ...]]:
        fetched = self.folder, self._listed, self._format
        return _open_again, (str(self.path), self._options, fetched)

    def __repr__(self) -> str:
        return f"StoreSource({str(self.path)!r})"

    def __str__(self) -> str:
        return printable(self.path)

    @property
    def path(self) -> StorePath:
        """A path that stands for the URL, in messages and reports."""
        return self.place.path if self._named is None else self.place.file(self._named)

    @property
    def load_format(self) -> str:
        """The format of the weights; that which was asked for if there are none."""
        return self._format or str(self._options["load_format"])

    def weights(self) -> StoredCheckpoint:
        """Open the weights: read and check the headers of all files, many at once.

        As in a local folder, an index is looked for first.
        """
        if (name := self._format) is None:
            raise self._nothing_to_open()
        format_ = FORMATS[name]
        if (reason := _ONLY_HERE.get(name)) is not None:
            raise self._only_here(name, reason)
        store = Store(self.place, self._client(), self._cache())
        with ExitStack() as opened:
            opened.callback(store.close)
            checkpoint: StoredCheckpoint
            if isinstance(format_, Unit):
                checkpoint = imported(format_.opener)(self._files(store))
            else:
                checkpoint = self._open_files(store, name, format_)
            opened.pop_all()
        return checkpoint

    def _open_files(self, store: Store, name: str, format_: Files) -> StoredCheckpoint:
        index = self.folder / str(format_.index)
        names_in: dict[str, set[str]] | None = None
        if self._named is not None:
            names = [self._named]
        elif is_there(index):
            names_in = read_index(index, format_.suffixes)
            names = sorted(names_in)
        elif (listed := self._list()) is None or format_.whole in listed:
            names = [str(format_.whole)]
        else:
            names = [path.name for path in format_.files(map(Path, sorted(listed)))]
        try:
            files = store.together(partial(open_file, store, each, name) for each in names)
        except CheckpointFormatError:
            if names_in is None or not format_.is_left_over(names_in, store.has):
                raise
            names_in, files = None, [open_file(store, str(format_.whole), name)]
        for file, _ in files if names_in is not None else ():
            check_against_index(index, names_in or {}, file)
        if self.place.scheme == REPLICA:
            from vllm_module.weights.stores.ranks import open_ranks  # few sources are engines

            return open_ranks(
                store,
                files,
                name,
                partial(web_client, replica_token=self._options["replica_token"]),
            )
        return StoredCheckpoint(store, files, name)

    def _files(self, store: Store) -> StoredFiles:
        return StoredFiles(store, self.folder, self._list, self._is_fetched, self._named)

    def _list(self) -> list[str] | None:
        """List the files; those of the hub when they are asked for first."""
        if self._listed is None and self.place.scheme == "hf":
            self._listed = hub_client.names(self.place, self._token)
        return self._listed

    def _is_fetched(self, name: str) -> bool:
        """Whether a small file is in the folder if there is one."""
        if self.place.scheme == "hf":
            return hub.is_small(name)
        return self._listed is None and name in (*_SMALL_NAMES, *_MARKERS, *self._indexes())

    def _find_format(self) -> str | None:
        """Return the format of the weights; ``None`` if there are none that are known."""
        load_format = self._options["load_format"]
        if load_format == "dummy":  # other files are not looked at, unless they say the config
            if is_there(self.folder / _CONFIG):
                return None
            load_format = "auto"
        formats = formats_of(load_format)
        if self._named is not None:
            named = self._named
            return next((name for name in formats if named.endswith(FORMATS[name].suffixes)), None)
        with closing(Store(self.place, self._client())) as store:
            files = self._files(store)
            for name in formats:
                # Those are refused by name where the store lists them.
                if (name not in _ONLY_HERE or self._listed) and FORMATS[name].is_in(files):
                    return name
        if self._listed is not None:
            return None
        # The file that is missing is named when it is opened.
        return formats[0] if len(formats) == 1 else "safetensors"

    def _only_here(self, load_format: str, reason: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"{self}: load_format {load_format!r} is read from a local folder only, because "
            f"{reason}: download the checkpoint"
        )

    def _nothing_to_open(self) -> CheckpointFormatError:
        formats = {*formats_of(self._options["load_format"])} - {*_ONLY_HERE}
        wanted = " or ".join(
            pattern for name in FORMATS if name in formats for pattern in FORMATS[name].patterns
        )
        names = ", ".join(map(printable_name, sorted(self._list() or ())[:20]))
        return CheckpointFormatError(
            f"{self} holds no {wanted} file, the formats that are read from a store; there is "
            f"{names or 'nothing'}. Download the checkpoint, or convert it"
        )

    def _client(self) -> Client:
        if self.place.scheme in BUCKETS:
            return ObstoreClient(self.place)
        if self.place.scheme == "hf":
            return hub_client.hub_client(self.place, self._token)
        return web_client(self.place, self._options["replica_token"])

    def _cache(self) -> StoreCache | None:
        folder = self._options["download_dir"]
        if folder is None:
            return None
        # The services' libraries read endpoints there, and a bucket of one is not that of another.
        endpoints = [
            (name, value)
            for name, value in sorted(os.environ.items())
            if re.fullmatch(
                r"(AWS|AZURE|GOOGLE|HF)_.*(ENDPOINT|BASE_URL|ACCOUNT_NAME).*", name, re.IGNORECASE
            )
        ]
        return StoreCache(Path(folder), repr(endpoints))

    def _fetch_small(self) -> CheckpointFormatError | None:
        """Fetch the small files into the folder; return what is wrong if config.json is missing."""
        with closing(Store(self.place, self._client())) as store:
            listed = self._listed = store.names()
            if listed is None:
                names: Iterable[str] = (*_SMALL_NAMES, *_MARKERS, *self._indexes())
            else:
                wanted = filter(_is_small, listed)
                others = (name for name in listed if name.endswith(".index.json"))
                names = [name for name in wanted if name not in {*others} - {*self._indexes()}]
                if "modules.json" in listed:
                    names.append(hub.POOLING)
                if "chat_template.jinja" in listed:
                    names += [each for each in _TEMPLATES if each not in names]
            rest = [name for name in names if name != _CONFIG]
            if len(rest) >= _MOST_FILES:
                raise CheckpointFormatError(
                    f"{printable(str(self.place))} has {len(rest) + 1} files of configuration and "
                    f"tokenizer, and at most {_MOST_FILES} are fetched: take out those that are "
                    "not of the model"
                )
            missing: CheckpointFormatError | None = None
            if listed is not None and _CONFIG not in listed:
                there = ", ".join(map(printable_name, sorted(listed)[:20])) or "nothing"
                missing = CheckpointFormatError(
                    f"{self} has no {_CONFIG}; there is {there}. Check the URL: it should be that "
                    "of the checkpoint's folder"
                )
            else:  # first, because its refusal tells whether anything is there
                try:
                    config = store.fetch(_CONFIG, MAX_JSON_BYTES)
                except CheckpointFormatError as error:
                    asked = FORMATS.get(self._options["load_format"])
                    by_name = isinstance(asked, Unit) and asked.suffixes
                    markers = _DESCRIBING if listed is None else ()
                    if not (by_name or self._named or any(map(store.has, markers))):
                        raise
                    missing = error
                else:
                    self._keep(_CONFIG, config)
            room, lock = _MOST_BYTES, threading.Lock()

            def fetch(name: str) -> None:
                nonlocal room
                # One that is there and changes answers, such as a tokenizer, is not left out.
                is_needed = name in _SMALL_NAMES and name in (listed or ())
                take = store.fetch if is_needed else store.fetch_optional
                if (data := take(name, MAX_JSON_BYTES)) is None:
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
            return missing

    def _keep(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data, printable(str(self.place)))

    def _indexes(self) -> list[str]:
        """Return the indexes of the formats that are asked for."""
        asked = self._options["load_format"]
        formats = [FORMATS[asked]] if asked in FORMATS else FORMATS.values()
        return [each.index for each in formats if isinstance(each, Files) and each.index]


def _is_small(name: str) -> bool:
    """Whether a file that is listed is wanted; a key of a bucket may be no name of a file."""
    possible = name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    return possible and any(fnmatch(name, pattern) for pattern in hub.SMALL_FILES)


def _open_again(
    url: str, options: dict[str, Any], fetched: tuple[Path, list[str] | None, str | None]
) -> StoreSource:
    """Return a pickled source; on another machine it fetches the small files itself."""
    return StoreSource(url, **options, fetched=fetched if fetched[0].is_dir() else None)

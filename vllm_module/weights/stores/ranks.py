"""The ranks of an engine as a checkpoint: each tensor is read where its boxes are."""

from __future__ import annotations

import logging
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from vllm_module.base.messages import describe_error, printable
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.chunked_handle import ChunkedHandle, TensorChunk
from vllm_module.weights.header import Entry
from vllm_module.weights.region import Box, overlap
from vllm_module.weights.stores.checkpoint import StoredCheckpoint, open_file
from vllm_module.weights.stores.client import Client
from vllm_module.weights.stores.place import Place
from vllm_module.weights.stores.store import Store
from vllm_module.weights.stores.stored_bytes import StoredBytes
from vllm_module.weights.strict_json import parse_object
from vllm_module.weights.weight_file import WeightFile, as_torch

_RANKS = "ranks.json"
_FILE = re.compile(r"rank-[0-9a-f]{16}\.safetensors")
_BOX = re.compile(r"(.+)@(\d{1,18}(?:,\d{1,18})*)")
_MOST_BYTES = 1 << 20  # of the ranks' ports
_MOST_RANKS = 4096
_MOST_BESIDE = 64  # boxes that another one is compared with; a server must not make that quadratic
_ASK_AGAIN = "Load from the engine again."
_PATIENCE = 3.0  # seconds in which a rank can be reached, or else the first one is asked for all

_log = logging.getLogger(__name__)

_Opened = list[tuple[WeightFile, StoredBytes]]


class RankedCheckpoint(StoredCheckpoint):
    """The tensors of an engine's ranks, of which each is asked for what it holds.

    Args:
        store: of the first rank, who has all tensors.
        files: its files.
        load_format: of all files.
        stores: of the other ranks.
        ranks: the file of each rank, the first one's too.

    """

    def __init__(
        self, store: Store, files: _Opened, load_format: str, stores: list[Store], ranks: _Opened
    ) -> None:
        super().__init__(store, files, load_format)  # the fingerprint is of these files alone
        self._stores, self._ranks = stores, ranks
        self._chunks = dict(_covered(self._owner, [file for file, _ in ranks]))

    @property
    def bytes_requested(self) -> int:
        """Bytes that were requested so far from all ranks, headers and gaps included."""
        return super().bytes_requested + sum(stored.bytes_requested for _, stored in self._ranks)

    @property
    def requests(self) -> int:
        """How many requests were made, without those that were tried again."""
        return super().requests + sum(stored.requests for _, stored in self._ranks)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far, from all ranks."""
        return super().bytes_read + sum(file.bytes_read for file, _ in self._ranks)

    def close(self) -> None:
        """Close the files and connections to all ranks."""
        super().close()
        for file, _ in self._ranks:
            file.close()
        for store in self._stores:
            store.close()

    def __getitem__(self, name: str) -> Any:
        chunks = self._chunks.get(name)
        if chunks is None:
            return super().__getitem__(name)
        file = self._owner[name]
        dtype, shape, *_ = file.entries[name]
        return ChunkedHandle(name, *as_torch(dtype, shape, None)[:2], chunks, file.path.parent)


def open_ranks(
    store: Store, files: _Opened, load_format: str, client_of: Callable[[Place], Client]
) -> StoredCheckpoint:
    """Return the checkpoint of an engine, read from its ranks if they can be asked.

    If one of them cannot, as behind a proxy that leads to the first one only, a line of the log
    says why, and the first one sends all.

    Raises ``WeightReadError`` if the weights change meanwhile, and ``CheckpointFormatError`` if
    the engine describes its ranks wrongly.
    """
    data = store.fetch_optional(_RANKS, _MOST_BYTES)
    if data is None:
        return StoredCheckpoint(store, files, load_format)
    name, ports = _described(data, printable(store.place.file(_RANKS)))
    address = urlsplit(str(store.place))
    host = f"[{address.hostname}]" if ":" in str(address.hostname) else address.hostname
    with ExitStack() as opened:
        stores = [store]
        try:
            for port in ports:
                # A firewall may drop what is sent to the port; a request would wait for longer.
                socket.create_connection((str(address.hostname), port), _PATIENCE).close()
                place = replace(store.place, host=f"{host}:{port}", folder="")
                stores.append(Store(place, client_of(place), patience=_PATIENCE))
                opened.callback(stores[-1].close)
            ranks = store.together(partial(open_file, each, name, load_format) for each in stores)
        except (OSError, CheckpointFormatError, WeightReadError) as error:
            _log.warning(
                "%s: the first rank sends all, because another cannot be asked for what it has: %s",
                printable(store.place.path),
                describe_error(error),
            )
            return StoredCheckpoint(store, files, load_format)
        for each in stores[1:]:
            each.patience = None
        # A change begins on the first rank: if that has its version now, all had when they opened.
        for file, stored in files:
            answer = store.read(file.path.name, 0, memoryview(bytearray(1)))
            if answer.version[:2] != stored.version[:2]:
                raise WeightReadError(
                    f"the weights of {printable(store.place.path)} changed while its ranks were "
                    f"asked for them. {_ASK_AGAIN}"
                )
        checkpoint = RankedCheckpoint(store, files, load_format, stores[1:], ranks)
        opened.pop_all()
    return checkpoint


def _described(data: bytes, where: str) -> tuple[str, list[int]]:
    """Return the name of the file that each rank has, and the ports of all but the first."""
    described = parse_object(data, where, _ASK_AGAIN)
    name, ports = described.get("file"), described.get("ports")
    if (
        not isinstance(name, str)
        or _FILE.fullmatch(name) is None
        or not isinstance(ports, list)
        or len(ports) > _MOST_RANKS
        or not all(type(port) is int and 0 < port < 1 << 16 for port in ports)
    ):
        raise CheckpointFormatError(
            f"{where} should have the name of a file and the ports of at most {_MOST_RANKS} ranks, "
            f"and has others. {_ASK_AGAIN}"
        )
    return name, ports


def _covered(
    tensors: Mapping[str, WeightFile], ranks: Sequence[WeightFile]
) -> Iterator[tuple[str, list[TensorChunk]]]:
    """Yield each tensor of which the ranks' boxes have every element once."""
    boxes: dict[str, list[tuple[TensorChunk, Entry]]] = {}
    for file in ranks:
        for key, entry in file.entries.items():
            if (found := _BOX.fullmatch(key)) is None:
                raise CheckpointFormatError(
                    f"{printable(file.path)} has a tensor that is no box of another. {_ASK_AGAIN}"
                )
            start = tuple(map(int, found[2].split(",")))
            chunk = TensorChunk(start, entry.shape, partial(file.__getitem__, key))
            boxes.setdefault(found[1], []).append((chunk, entry))
    for name, of_tensor in boxes.items():
        if name not in tensors:
            continue
        dtype, shape, *_ = tensors[name].entries[name]
        fit = all(
            entry.dtype == dtype
            and len(start) == len(size) == len(shape)
            and all(at + n <= most for at, n, most in zip(start, size, shape, strict=True))
            for (start, size, _), entry in of_tensor
        )
        sizes = sum(math.prod(chunk.shape) for chunk, _ in of_tensor)
        if not fit or sizes != math.prod(shape):
            continue
        if _apart([tuple(zip(*chunk[:2], strict=True)) for chunk, _ in of_tensor]):
            yield name, [chunk for chunk, _ in of_tensor]


def _apart(boxes: Sequence[Box]) -> bool:
    """Return whether no boxes overlap; ``False``, too, where that would take long to find out.

    A box is compared only with those that lie beside it in the dimension with most starts.
    """
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    beside: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        beside = [other for other in beside if sum(other[dim]) > box[dim][0]]
        if len(beside) > _MOST_BESIDE or any(overlap(box, other) for other in beside):
            return False
        beside.append(box)
    return True

"""Whether ranks read together, by where the checkpoint is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_module.base.shared_memory import host_name
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import os_pages
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.regular_file import open_regular
from vllm_module.weights.stores.checkpoint import StoredCheckpoint

_SAMPLES = 64  # places of a file that are looked up in the page cache


class Facts(NamedTuple):
    """What a rank tells the others before they choose.

    Attributes:
        host: differs between hosts, and may between containers on one.
        files: what tells copies of the local files apart; ``None`` if there are no local files.
        cached: whether this host's page cache has them.

    """

    host: str
    files: tuple[tuple[int, int], ...] | None
    cached: bool

    @staticmethod
    def of(checkpoint: OpenWeights) -> Facts:
        """Find out about a checkpoint that this rank has opened."""
        host = host_name()
        if not isinstance(checkpoint, Checkpoint) or isinstance(checkpoint, StoredCheckpoint):
            return Facts(host, None, cached=False)
        try:
            status = [os.stat(path) for path in checkpoint.files]
            cached = is_cached(checkpoint.files)
        except (OSError, CheckpointFormatError):  # deleted since, which open files outlive
            return Facts(host, (), cached=False)
        files = tuple((each.st_ino, each.st_mtime_ns) for each in status)
        return Facts(host, files, cached)


def is_cached(files: Sequence[Path]) -> bool:
    """Tell whether the page cache has samples of all ``files``; where nothing can tell, say no."""
    for path in files:
        descriptor = open_regular(path, None)
        try:
            nbytes = os.fstat(descriptor).st_size
            places = (nbytes * sample // (2 * _SAMPLES) for sample in range(1, 2 * _SAMPLES, 2))
            if nbytes and not all(os_pages.is_cached(descriptor, place) for place in places):
                return False
        finally:
            os.close(descriptor)
    return True


def chosen(
    choice: Literal["auto"] | bool,
    checkpoint: OpenWeights,
    gather: Callable[[Callable[[], Facts]], list[Facts]],
) -> bool:
    """Tell whether ranks read together. Every rank makes the same call with the same choice."""
    return reads_less(gather(lambda: Facts.of(checkpoint))) if choice == "auto" else choice


def reads_less(facts: Sequence[Facts]) -> bool:
    """Tell whether ranks with these facts read less together.

    They do from a source without local files, and from a file system that several hosts share. The
    page cache of a host passes local files to all its ranks.
    """
    if any(each.files is None for each in facts):
        return True
    hosts, copies = {each.host for each in facts}, {each.files for each in facts}
    return len(hosts) > 1 and len(copies) == 1 and not all(each.cached for each in facts)

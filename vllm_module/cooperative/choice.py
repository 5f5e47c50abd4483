"""Whether ranks read together, by where the checkpoint is."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_module.distributed.shared_memory import Offer
from vllm_module.distributed.shared_ring import TAGS
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.regular_file import open_regular
from vllm_module.weights.stores.checkpoint import StoredCheckpoint

_SAMPLES = 64  # places of a file that are looked up in the page cache


class Facts(NamedTuple):
    """What a rank tells the others before they choose.

    Attributes:
        host: differs between hosts, and may between containers on one.
        offer: of memory for the buffers.
        tag: for the messages of this load, if this is the first rank.
        files: what tells copies of the local files apart; ``None`` if there are no local files.
        cached: whether this host's page cache has them.

    """

    host: str
    offer: Offer | None
    tag: int
    files: tuple[tuple[int, int], ...] | None
    cached: bool

    @staticmethod
    def of(checkpoint: OpenWeights, offer: Offer | None) -> Facts:
        """Find out about a checkpoint that this rank has opened."""
        host = platform.node() if offer is None else offer.host
        tag = secrets.choice(TAGS)
        if not isinstance(checkpoint, Checkpoint) or isinstance(checkpoint, StoredCheckpoint):
            return Facts(host, offer, tag, None, cached=False)
        try:
            status = [os.stat(path) for path in checkpoint.files]
            cached = is_cached(checkpoint.files)
        except (OSError, CheckpointFormatError):  # deleted since, which open files outlive
            return Facts(host, offer, tag, (), cached=False)
        files = tuple((each.st_ino, each.st_mtime_ns) for each in status)
        return Facts(host, offer, tag, files, cached)


def is_cached(files: Sequence[Path]) -> bool:
    """Tell whether the page cache has samples of all ``files``; elsewhere than on Linux, say no."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    for path in files:
        descriptor = open_regular(path, None)
        try:
            nbytes = os.fstat(descriptor).st_size
            for sample in range(1, 2 * _SAMPLES, 2):
                os.preadv(descriptor, [byte], nbytes * sample // (2 * _SAMPLES), os.RWF_NOWAIT)
        except OSError:  # it is not there, or the file system cannot tell
            return False
        finally:
            os.close(descriptor)
    return True


def choose(choice: Literal["auto"] | bool, facts: Sequence[Facts]) -> bool:
    """Tell whether ranks with these facts read together.

    ``"auto"`` does so where it reads less: from a source without local files, and from a file
    system that several hosts share. The page cache of a host passes local files to all its ranks.
    """
    if choice != "auto":
        return choice
    if any(each.files is None for each in facts):
        return True
    hosts, copies = {each.host for each in facts}, {each.files for each in facts}
    return len(hosts) > 1 and len(copies) == 1 and not all(each.cached for each in facts)

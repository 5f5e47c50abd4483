"""Anonymous memory that processes of one host share."""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TOKEN_BYTES = 16  # at the end of the memory, until it is joined


class Offer(NamedTuple):
    """The data by which other processes of a host find memory that one of them offers."""

    host: str
    pid: int
    descriptor: int
    token: bytes


def host_name() -> str:
    """Return what differs between hosts; without Linux, it may be the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class OfferedMemory:
    """Memory that other processes of this host may map; the kernel allocates it on first use.

    Outside of Linux no other process can map it, and ``offer`` is ``None``.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._descriptor = -1
        self.offer: Offer | None = None
        with suppress(OSError, AttributeError):
            self._descriptor = os.memfd_create("vllm-module")
            token = secrets.token_bytes(TOKEN_BYTES)
            # Writing at the end gives the memory its size.
            os.pwrite(self._descriptor, token, nbytes - TOKEN_BYTES)
            self.offer = Offer(host_name(), os.getpid(), self._descriptor, token)

    def join(
        self, offers: Sequence[Offer | None], rank: int, *, allocated: bool = True
    ) -> tuple[mmap.mmap, int]:
        """Map memory of the first rank whose offer can be used; return it and the rank.

        The rank may be ``rank``, this process's own. Its memory is ``allocated`` then, or later by
        :meth:`allocate`. Raises ``OSError`` if there is no memory.
        """
        for other, offer in enumerate(offers[:rank]):
            if offer is not None and self.offer is not None and offer.host == self.offer.host:
                # Containers with separate process ids cannot open it.
                with suppress(OSError):
                    return self._map(offer), other
        if self._descriptor < 0:
            return mmap.mmap(-1, self._nbytes), rank
        if allocated:
            self.allocate(0, self._nbytes)
        return mmap.mmap(self._descriptor, self._nbytes), rank

    def allocate(self, start: int, nbytes: int) -> None:
        """Allocate some bytes of this process's own memory; a later shortage would be a SIGBUS."""
        if self._descriptor >= 0 and nbytes:
            os.posix_fallocate(self._descriptor, start, nbytes)

    def _map(self, offer: Offer) -> mmap.mmap:
        descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(descriptor, TOKEN_BYTES, self._nbytes - TOKEN_BYTES) != offer.token:
                raise OSError("another process has the number of the one that offered memory")
            return mmap.mmap(descriptor, self._nbytes)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Withdraw the offer; existing mappings stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

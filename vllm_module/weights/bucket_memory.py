"""The memory of buckets in which weights are sent: of each rank, or shared by those of a host."""

from __future__ import annotations

import torch

from vllm_module.base.shared_memory import TOKEN_BYTES, Offer, OfferedMemory


class BucketMemory:
    """The bucket of a rank; or two in turns, which the sender offers and others of its host map.

    The sender fills one while the others read the last one, so no byte goes through a socket.

    Attributes:
        turn: which of the two is meant, 0 or 1.
        shares: False if memory is this rank's own.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buckets = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._offered: list[OfferedMemory | None] = [None, None]
        self.turn = 0
        self.shares = device.type == "cpu"

    @property
    def current(self) -> torch.Tensor:
        """The bucket of this turn, uint8 ``[n]``."""
        return self._buckets[self.turn]

    @property
    def offer(self) -> Offer | None:
        """How others find the bucket of this turn."""
        offered = self._offered[self.turn]
        return None if offered is None else offered.offer

    def next(self) -> None:
        """Begin the next turn, with the other bucket if others may read this one."""
        self.turn = 1 - self.turn if self.shares else self.turn

    def reserve(self, nbytes: int, offer: Offer | None = None) -> None:
        """Make a bucket for this turn, or map what a sender offers.

        Raises ``OSError`` or torch's error if there is no memory.
        """
        self._withdraw(self.turn)
        self._buckets[self.turn] = self.current.new_empty(0)  # free the old one first
        if not self.shares:
            bucket = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        else:
            self._offered[self.turn] = offered = OfferedMemory(nbytes + TOKEN_BYTES)
            offers = [] if offer is None else [offer]
            mapped, found = offered.join(offers, len(offers), allocated=False)
            self.shares = found == 0 and offered.offer is not None
            if offer is not None:
                self._withdraw(self.turn)
            bucket = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes)
        self._buckets[self.turn] = bucket

    def allocate(self, start: int, nbytes: int) -> None:
        """Take memory from the system for bytes that are written next; raises as ``reserve``."""
        offered = self._offered[self.turn]
        if offered is not None:
            offered.allocate(start, nbytes)

    def _withdraw(self, turn: int) -> None:
        offered, self._offered[turn] = self._offered[turn], None
        if offered is not None:
            offered.close()

    def close(self) -> None:
        """Free the buckets, as far as no tensor is a view of them."""
        for turn in (0, 1):
            self._withdraw(turn)
        self._buckets = [self.current.new_empty(0)] * 2

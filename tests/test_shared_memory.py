"""Memory that one process offers: what is mapped is that memory, or this process's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_module.base.shared_memory import Offer, OfferedMemory

NBYTES = 8192


@pytest.fixture
def offered() -> Iterator[list[OfferedMemory]]:
    memories = [OfferedMemory(NBYTES) for _ in range(3)]
    yield memories
    for memory in memories:
        memory.close()


def changed(offer: Offer | None, **changes: object) -> Offer:
    assert offer is not None, "the tests run on Linux"
    return offer._replace(**changes)


def test_the_first_offer_that_can_be_used_is_taken(offered: list[OfferedMemory]) -> None:
    """What one process writes, the others read; a rank without an offer is passed over."""
    offers = [None, offered[1].offer, offered[2].offer]
    maps = [memory.join(offers, rank) for rank, memory in enumerate(offered)]
    assert [rank for _, rank in maps] == [0, 1, 1]
    maps[1][0][:5] = b"hello"
    assert maps[2][0][:5] == b"hello"
    assert maps[0][0][:5] == bytes(5)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "another"},
        {"pid": 2**22 + 1},  # none has this number
        {"descriptor": 10**6},
        {"token": bytes(16)},  # another process has its number, and memory of its own
        {"token": b""},
    ],
)
def test_an_offer_that_leads_elsewhere_is_not_taken(
    offered: list[OfferedMemory], changes: dict[str, object]
) -> None:
    """Each entry of an offer counts: with another one, the next offer is taken."""
    wrong = changed(offered[0].offer, **changes)
    theirs, rank = offered[2].join([wrong, offered[1].offer, offered[2].offer], 2)
    assert rank == 1
    own, rank = offered[2].join([wrong, None, offered[2].offer], 2)
    assert rank == 2
    own[:3] = b"own"
    assert theirs[:3] == bytes(3)


def test_allocated_memory_is_taken_at_once(offered: list[OfferedMemory]) -> None:
    """The kernel's own count of it, from which a later write that finds none would be a SIGBUS."""

    def taken(memory: OfferedMemory) -> int:
        assert memory.offer is not None
        return 512 * os.stat(f"/proc/self/fd/{memory.offer.descriptor}").st_blocks

    first, second, _ = offered
    first.join([], 0)
    assert taken(first) >= NBYTES
    second.join([], 0, allocated=False)
    before = taken(second)
    second.allocate(0, NBYTES // 2)
    assert before < NBYTES
    assert taken(second) == before + NBYTES // 2


@pytest.mark.parametrize("lacks", ["the call", "descriptors"])
def test_memory_that_cannot_be_offered_is_its_own(
    offered: list[OfferedMemory], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system has no such memory, or gives none: it is mapped, and all is writable."""

    def refused(*_: object) -> int:
        raise OSError(24, "Too many open files")

    if lacks == "the call":
        monkeypatch.delattr(os, "memfd_create")  # as on macOS
    else:
        monkeypatch.setattr(os, "memfd_create", refused)  # the tests need their own descriptors
    memory = OfferedMemory(NBYTES)
    assert memory.offer is None
    own, rank = memory.join([offered[0].offer, memory.offer], 1)
    assert rank == 1
    memory.allocate(0, NBYTES)
    own[:] = b"x" * NBYTES
    others, _ = offered[0].join([offered[0].offer], 0)
    assert others[:3] == bytes(3)
    memory.close()
    memory.allocate(0, NBYTES)
    assert own[-3:] == b"xxx"


def test_a_program_that_is_started_does_not_inherit_memory(offered: list[OfferedMemory]) -> None:
    """Its descriptor would keep the memory allocated as long as the program runs."""
    offer = offered[0].offer
    assert offer is not None
    link = os.readlink(f"/proc/self/fd/{offer.descriptor}")
    assert "vllm-module" in link
    show = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64)"
    show += " if os.path.lexists(f'/proc/self/fd/{n}')])"
    command = [sys.executable, "-S", "-c", show]
    ran = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True)
    assert "vllm-module" not in ran.stdout

"""What a rank lets NIXL read is let go again: each memory, each read and each peer, once.

The package is optional, and its place takes an agent that counts as NIXL's does.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.cooperative.nixl import FRAME, NixlCarrier

SOON = timedelta(seconds=5)


class Agent:
    """Has the methods of NIXL's agent that are called; a read copies in this process.

    ``fails`` names a method that raises, as where a peer has ended.
    """

    memories: dict[bytes, torch.Tensor]
    fails = ""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.held, self.calls = name, Counter[str](), Counter[str]()
        self.memories = AGENTS.setdefault(name, {})

    def _call(self, what: str) -> None:
        self.calls[what] += 1
        if what == self.fails:
            raise RuntimeError(f"the peer has ended: {what}")

    def register_memory(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._call("register_memory")
        self.held["memory"] += 1
        return tensors

    def deregister_memory(self, tensors: list[torch.Tensor]) -> None:
        self._call("deregister_memory")
        self.held["memory"] -= 1

    def get_xfer_descs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def get_serialized_descs(self, tensors: list[torch.Tensor]) -> bytes:
        key = b"%s %d" % (self.name.encode(), len(self.memories))
        self.memories[key] = tensors[0]
        return key

    def deserialize_descs(self, key: bytes) -> torch.Tensor:
        return AGENTS[key.split()[0].decode()][key]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._call("add_remote_agent")
        self.held["peer"] += 1
        return metadata.decode()

    def remove_remote_agent(self, peer: str) -> None:
        self._call("remove_remote_agent")
        self.held["peer"] -= 1

    def initialize_xfer(self, how: str, here: list[torch.Tensor], there: Any, peer: str) -> Any:
        assert how == "READ"
        self.held["read"] += 1
        return here[0], there

    def transfer(self, read: Any) -> str:
        self._call("transfer")
        return "PROC"

    def check_xfer_state(self, read: Any) -> str:
        read[0].copy_(read[1])
        return "DONE"

    def release_xfer_handle(self, read: Any) -> None:
        self._call("release_xfer_handle")
        self.held["read"] -= 1


AGENTS: dict[str, dict[bytes, torch.Tensor]] = {}


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    AGENTS.clear()
    api = ModuleType("nixl._api")
    vars(api).update(nixl_agent=Agent, nixl_agent_config=lambda **_: SimpleNamespace())
    # The package is optional, and needs UCX.
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)


def test_messages_arrive_and_memory_is_let_go() -> None:
    """Twice, because one agent serves a transfer with several batches."""
    one, other = NixlCarrier(), NixlCarrier()
    for count in (1, 3):
        sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in range(5, 5 + count)]
        frames = [one.offered(each) for each in sent]
        assert all(frame.shape == (FRAME,) for frame in frames)
        rooms = [torch.zeros_like(each) for each in sent]
        started = [other.start(f, room) for f, room in zip(frames, rooms, strict=True)]
        for each in started:
            other.finish(each, SOON)
        torch.testing.assert_close(rooms, sent, rtol=0, atol=0)
        memories = [weakref.ref(each.untyped_storage()) for each in (*sent, *rooms)]
        del sent, frames, rooms, started, each
        for carrier in (one, other):
            carrier.release()
            assert not +carrier._agent.held
            assert (
                carrier._agent.calls["deregister_memory"] == carrier._agent.calls["register_memory"]
            ), "each once"
        for memory in AGENTS.values():
            memory.clear()
        gc.collect()
        assert not any(memory() for memory in memories)


@pytest.mark.parametrize(
    "fails",
    ["add_remote_agent", "transfer", "release_xfer_handle", "deregister_memory"],
)
def test_memory_is_let_go_after_a_peer_has_ended(fails: str) -> None:
    one, other = NixlCarrier(), NixlCarrier()
    room = torch.zeros(5, dtype=torch.uint8)
    frame = one.offered(torch.ones(5, dtype=torch.uint8))
    other._agent.fails = fails
    if fails in ("add_remote_agent", "transfer"):
        with pytest.raises(RuntimeError, match=r"cannot read there: .*the peer has ended"):
            other.start(frame, room)
    else:
        other.finish(other.start(frame, room), SOON)
    memory = weakref.ref(room.untyped_storage())
    del room
    other.release()
    gc.collect()
    assert memory() is None

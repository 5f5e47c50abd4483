"""Bytes that NIXL moves: one rank reads another's memory, over RDMA where there is some.

NIXL (``pip install nixl``) is NVIDIA's library for transfers between the memories of processes, by
UCX and others. A message of a process group says where the bytes lie; the receiver reads them.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from vllm_module.base.messages import describe_error

FRAME = 8192  # bytes of the message that says where bytes lie
_POLL = 0.0002  # seconds


class NixlCarrier:
    """One rank's agent of NIXL, for the messages of one transfer.

    Raises ``ImportError`` without the package, and what NIXL raises without its plugin for UCX.
    """

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError(
                "transport='nixl' needs the package nixl: pip install nixl, or the extra nixl"
            ) from error
        self._agent: Any = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._registered: list[Any] = []
        self._reads: list[tuple[Any, str]] = []

    def offered(self, memory: torch.Tensor) -> torch.Tensor:
        """Let others read ``memory``; return the frame that says where it is, uint8 ``[FRAME]``."""
        self._registered.append(self._agent.register_memory([memory]))
        places = self._agent.get_serialized_descs(self._agent.get_xfer_descs([memory]))
        parts = [self._agent.get_agent_metadata(), places]
        data = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        if len(data) > FRAME:
            raise RuntimeError(f"NIXL describes memory by {len(data)} bytes, more than {FRAME}")
        return torch.frombuffer(bytearray(data.ljust(FRAME, b"\0")), dtype=torch.uint8)

    def start(self, frame: torch.Tensor, room: torch.Tensor) -> Any:
        """Begin to read what a frame says into ``room``, of the same size; return the read.

        Raises ``RuntimeError`` if the other rank cannot be reached.
        """
        data, parts = frame.numpy().tobytes(), []
        for _ in range(2):
            size = int.from_bytes(data[:4], "little")
            parts.append(data[4 : 4 + size])
            data = data[4 + size :]
        agent = self._agent
        try:
            self._registered.append(agent.register_memory([room]))
            peer = agent.add_remote_agent(parts[0])
            here, there = agent.get_xfer_descs([room]), agent.deserialize_descs(parts[1])
            read = agent.initialize_xfer("READ", here, there, peer)
            self._reads.append((read, peer))
            return read, agent.transfer(read)
        except Exception as error:  # of NIXL's own class, about a peer that has ended
            raise RuntimeError(f"NIXL cannot read there: {describe_error(error)}") from error

    def finish(self, started: Any, limit: timedelta) -> None:
        """Wait for a read; raise ``RuntimeError`` if it fails, or does not end in time."""
        read, state = started
        end = time.monotonic() + limit.total_seconds()
        while state == "PROC":
            if time.monotonic() > end:
                raise RuntimeError(f"NIXL's read did not end within {limit.total_seconds():g} s")
            time.sleep(_POLL)
            state = self._agent.check_xfer_state(read)
        if state != "DONE":
            raise RuntimeError(f"NIXL's read has failed: {state}")

    def release(self) -> None:
        """Let go of all memory: others have read it, or never will."""
        reads, self._reads = self._reads, []
        registered, self._registered = self._registered, []
        for read, peer in reads:
            with suppress(Exception):  # of NIXL, about a peer that has ended
                self._agent.release_xfer_handle(read)
                self._agent.remove_remote_agent(peer)
        for each in registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)

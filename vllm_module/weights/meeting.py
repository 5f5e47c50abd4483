"""Processes of different programs that meet at an address, to send weights."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.base.messages import printable, shorten
from vllm_module.base.process_groups import private_group
from vllm_module.base.waiting import SLICE, WaitLimitError, interruptibly
from vllm_module.errors import RankError

_stores: Any = dist  # torch.distributed has the stores; its type hints lack them
_POLL = 0.01  # seconds between two looks whether all have met
_LOOK = 1.0  # seconds between two looks of others than rank 0 at who has come
_MARK = "+"
_ANSWER = 2.0  # seconds after the time is over, in which this process says itself who did not come
_QUIET = 0.5  # seconds without an answer, after which that is not waited for


def init_weight_transfer(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
) -> dist.ProcessGroup:
    """Meet ``world_size`` processes at an address, and return a group of them all.

    It is for ``group=`` of ``send_weights``, ``receive_weights``, ``send_boxes`` and
    ``receive_boxes``. No other group of the program changes, and none is needed: a trainer may have
    a world of its own, and an engine none.

    Args:
        host, port: where the others reach rank 0; all give the same. Rank 0 listens on all of its
            addresses, and whoever reaches the port may take part: keep it in a network of yours.
        rank: this process's number in the group, from 0 on. One has each.
        world_size: number of processes, two or more.
        device: a CUDA device, the current one, to send by NCCL too (written, but not run).
        timeout: seconds to wait until all have come, and of each message afterwards.

    Raises:
        ValueError: a number is out of range, another process has this rank, or expects another
            number of processes.
        OSError: rank 0 cannot listen there, as where the port is taken.
        RankError: processes have not come in time, or rank 0 has ended; ``ranks`` names them.

    """
    for name, value, least in (("rank", rank, 0), ("world_size", world_size, 2), ("port", port, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} should be an integer from {least} on, got {shorten(value)}")
    if port > 65535:
        raise ValueError(f"port should be at most 65535, got {port}")
    if rank >= world_size:
        raise ValueError(f"rank should be below the world_size {world_size}, got {rank}")
    if not 0 < timeout < 1e8:
        raise ValueError(f"timeout should be a number of seconds above 0, got {timeout!r}")
    device = torch.device(device)
    left, met, heard = Event(), Event(), Event()
    waited, silent, late = 0.0, -timeout, ""  # it cannot answer before it is reached

    def lost() -> str:
        """Tell whether the store, whose waits have no limit while it is silent, takes too long."""
        nonlocal waited, silent, late
        waited += SLICE
        silent = 0.0 if heard.is_set() else silent + SLICE
        heard.clear()
        if waited > timeout * (1 + met.is_set()) + (_ANSWER if silent < _QUIET else 0):
            late = f"rank 0 at {printable(host)}:{port} does not answer within {timeout:g} s"
        return late

    meet = partial(
        _meet, host, port, rank, world_size, device, timedelta(seconds=timeout), left, met, heard
    )
    try:
        return interruptibly(meet, lost=lost)
    except WaitLimitError:
        if not late:  # it is the limit of whoever called this
            raise
        raise RankError(
            f"{late}: it is stopped, or something else listens there. Start all again", [0]
        ) from None
    finally:
        left.set()  # after an interrupt, the call goes on in its thread


def _meet(
    host: str,
    port: int,
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    left: Event,
    met: Event,
    heard: Event,
) -> dist.ProcessGroup:
    end = time.monotonic() + timeout.total_seconds()
    where = f"{printable(host)}:{port}"
    try:
        if rank:
            _reach(host, port, end, left, heard)
        store = _stores.TCPStore(
            host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
    except (OSError, RuntimeError) as error:  # c10d's has the trace of C++ in its text
        reason = str(error).partition("\n")[0]
        if rank == 0:
            raise OSError(f"rank 0 cannot listen at {where}: {reason}") from None
        raise RankError(
            f"rank 0 does not listen at {where} within {timeout.total_seconds():g} s: start it, or "
            f"correct the address ({reason})",
            [0],
        ) from None
    try:
        _check_in(store, where, rank, size, timeout, end, left, heard)
        met.set()
        group = private_group(_stores.PrefixStore("weights", store), rank, size, device, timeout)
        if not left.is_set():
            return group
        del group
        failure: BaseException = RankError("this process has left")
    except BaseException as error:
        # Rank 0 listens as long as there is its store, which frames of a kept error would hold:
        # the others would wait for it until their own time is over.
        failure = error.with_traceback(None)
    del store
    if isinstance(failure, RuntimeError) and not isinstance(failure, RankError):  # of c10d
        raise RankError(
            f"the processes at {where} lost each other, because one ended or hangs: start all "
            f"again ({str(failure).partition(chr(10))[0]})",
            [0] if rank else [],
        )
    raise failure


def _reach(host: str, port: int, end: float, left: Event, heard: Event) -> None:
    """Wait until something listens, or raise ``OSError`` at ``end``: c10d ends its tries later."""
    while True:
        try:
            seconds = max(_POLL, end - time.monotonic())
            socket.create_connection((host, port), seconds).close()
            heard.set()
            return
        except OSError:
            if time.monotonic() > end or left.is_set():
                raise
        time.sleep(_POLL)


def _check_in(
    store: Any,
    where: str,
    rank: int,
    size: int,
    timeout: timedelta,
    end: float,
    left: Event,
    heard: Event,
) -> None:
    """Wait until all processes have come, or until ``end``; ``left`` tells that nobody waits.

    Each writes a word of its own to its place. Once all are there, rank 0 marks them, and says that
    all have met. Who is marked cannot leave, so nobody waits for one who has left.
    """
    expected = store.compare_set("size", "", str(size)).decode()
    if expected != str(size):
        raise ValueError(
            f"this process expects {size} processes at {where}, and another one {expected}: give "
            "all the same world_size"
        )
    place, own = f"place/{rank}", uuid.uuid4().hex
    if store.compare_set(place, "", own).decode() != own:
        raise ValueError(
            f"another process has come to {where} as rank {rank}: give each a rank of its own. If "
            "it was this one, before it ended, start all again"
        )
    absent, look = [*range(size)], 0.0
    while True:
        try:  # not store.wait, which prints warnings when the time is over
            if store.check(["met"]):
                return
            heard.set()
            is_over = time.monotonic() > end or left.is_set()
            if rank == 0 or is_over or time.monotonic() > look:
                look = time.monotonic() + _LOOK
                words = [_word(store, each) for each in range(size)]
                absent = [each for each, word in enumerate(words) if not word]
                if rank == 0 and not absent and _all_stay(store, words):
                    store.set("met", "")
                    return
            if is_over and (rank == 0 or store.compare_set(place, own, "") == b""):
                break
        except RuntimeError:  # of c10d
            raise RankError(
                f"rank 0 at {where} has ended or given up before all had come (not there until "
                f"then: {', '.join(map(str, absent)) or 'nobody'}): start all again",
                {0, *absent},
            ) from None
        time.sleep(_POLL)
    if not absent:
        raise RankError(
            f"all {size} ranks came to {where}, and rank 0 had not let them in after "
            f"{timeout.total_seconds():g} s: give a longer timeout, and start all again",
            [0],
        )
    names = ", ".join(map(str, absent))
    raise RankError(
        f"rank{'s' * (len(absent) > 1)} {names} of {size} did not come to {where} within "
        f"{timeout.total_seconds():g} s",
        absent,
    )


def _word(store: Any, rank: int) -> str:
    """Return what is at the place of a rank: nothing, if none has come or it has left."""
    place = f"place/{rank}"
    return str(store.get(place).decode()) if store.check([place]) else ""


def _all_stay(store: Any, words: Sequence[str]) -> bool:
    """Mark all places, or none if a rank has left, or another process has come in its place."""
    marked: list[int] = []
    for rank, word in enumerate(words):
        if store.compare_set(f"place/{rank}", word, word + _MARK).decode() != word + _MARK:
            break
        marked.append(rank)
    else:
        return True
    for rank in marked:
        store.compare_set(f"place/{rank}", words[rank] + _MARK, words[rank])
    return False

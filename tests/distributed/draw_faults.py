"""Draw faults of ranks in memory: ``draw_faults.py FIRST LAST`` prints draws that were wrong."""

from __future__ import annotations

import logging
import os
import random
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_module.distributed import exchange
from vllm_module.errors import RankError

memory = runpy.run_path(str(Path(__file__).with_name("in_memory.py")))
KINDS = ("die", "refuse", "hang", "stop", "collective")
MOST = 60.0  # seconds of a draw, most of which a busy machine may take
TIMEOUT = 2.0  # seconds, of draws with a rank that hangs or is stopped


def draw(seed: int) -> str:
    """Let a drawn number of ranks fail; return what others have not named, or ``""``."""
    choose = random.Random(seed)
    size = choose.randrange(2, 41)
    most = choose.choice((1, 2, size - 1))
    failing = {
        rank: choose.choice(KINDS[:4])
        for rank in choose.sample(range(size), choose.randint(1, min(most, size - 1)))
    }
    if choose.random() < 0.3:  # of one kind
        failing = dict.fromkeys(failing, choose.choice(KINDS[:4]))
    late = {"hang", "stop"} & {*failing.values()}
    delays = [choose.random() * choose.choice((0, 0.1, 0.4)) for _ in range(size)]
    collective = not late and choose.random() < 0.3
    network, over = memory["Network"](size), threading.Event()

    def work(rank: int) -> int:
        time.sleep(delays[rank])
        kind = failing.get(rank)
        if kind == "die":
            network.close(rank)
            raise memory["Killed"]
        if kind == "refuse":
            raise ValueError(f"of {rank}")
        if kind == "hang":
            over.wait()
        if kind == "stop":
            network.stopped.add(rank)
            over.wait()
        if collective:  # a collective fails once a rank has left
            while not network.closed:
                time.sleep(0.005)
            raise RuntimeError("connection closed")
        return rank

    begin = time.monotonic()
    timer = threading.Timer(20, over.set)
    timer.start()
    survivors = [rank for rank in range(size) if rank not in failing]
    found = network.run(work, TIMEOUT if late else 3600.0, waits_for=survivors)
    seconds = time.monotonic() - begin
    timer.cancel()
    network.end()
    over.set()
    wrong: dict[Any, Any] = {}
    for rank in survivors:
        error = found.get(rank)
        ranks = error.ranks if isinstance(error, RankError) else error
        # Ranks of a collective leave as soon as they know of one that failed.
        right = ranks and {*ranks} <= {*failing} if collective else ranks == tuple(sorted(failing))
        if not isinstance(error, RankError) or not right:
            wrong[rank] = ranks
        elif kinds := [r for r in error.ranks if failing[r] == "refuse"]:
            text = str(error)
            if len(failing) < 3 and any(f"ValueError: of {r}" not in text for r in kinds):
                wrong[rank] = text
    if wrong or seconds > MOST:
        return f"{seed}: {size} ranks, {failing}, {collective}, {seconds:.1f} s: {wrong}"
    return ""


def draw_sending(seed: int) -> str:
    """Let ranks die after a drawn number of messages: nobody else is named, and nobody hangs."""
    choose = random.Random(seed)
    size = choose.randrange(3, 24)
    network = memory["Network"](size)
    for rank in choose.sample(range(size), choose.choice((1, 1, 2))):
        network.dies_after[rank] = choose.randrange(4 * size.bit_length())
    survivors = [rank for rank in range(size) if rank not in network.dies_after]
    begin = time.monotonic()
    found = network.run(lambda rank: rank, 3600.0, waits_for=survivors)
    seconds = time.monotonic() - begin
    died = {*network.dies_after} & network.closed
    network.end()
    wrong = {}
    for rank in survivors:
        each = found.get(rank)
        named = isinstance(each, RankError) and {*each.ranks} <= died
        if not named and each != list(range(size)):
            wrong[rank] = str(each)
    if wrong or seconds > MOST:
        return f"{seed}: {size} ranks, {network.dies_after}, {seconds:.1f} s: {wrong}"
    return ""


def main(first: int, last: int) -> None:
    memory["in_memory"]()
    logging.disable()
    threading.excepthook = lambda _: None  # threads of ranks that have died
    exchange._ANSWERS = 2.0  # type: ignore[misc]
    draws = [(each, seed) for seed in range(first, last) for each in (draw, draw_sending)]
    wrong = [found for each, seed in draws if (found := each(seed))]
    sys.stdout.write("".join(f"{each}\n" for each in wrong))
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""What a step of training costs to send to an engine, of the elements that changed and of all.

    python tests/bench/transfer.py [--rounds 5] [--out tests/bench/results/transfer.json]

A trainer in a process of its own has bfloat16 weights of 127 million parameters and changes a share
of the elements, drawn evenly. In each round, for each share, it finds the changes ("found") and
sends them in the host's memory, then all tensors: to a receiver that takes them and does nothing
("sent"), to the engine ("pause": the engine computes nothing then), to both as if they were on
another host, over gloo ("sent by gloo", "pause by gloo"), and by a file ("written", "opened" beside
the engine's steps, and its "pause by file"). All tensors are sent by ``send_boxes``, too ("sent by
boxes", "pause by boxes"). What the file has is copied into memory that is in use ("copied") and
into memory that the system has to give first ("copied to new memory"): the limits of the others.

Then requests run in the engine, in a thread of their own: "gap" is the longest time between two of
their steps, "gap with an update" while one comes in the host's memory, "gap with a file" while one
is opened and taken. Each process has one thread that computes. There are no figures if the engine
does not have the trainer's weights after each way.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from machine import clock, machine, spread, write
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.base import shared_memory
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import Layout, TransferPlan, layout_of_shards, parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.weights import (
    find_changes,
    init_weight_transfer,
    open_update,
    receive_weights,
    send_weights,
    write_update,
)
from vllm_module.weights.digests import digest_weight

CONFIG = {
    "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
SHARES = 0.01, 0.02, 0.03
WAYS = "changes", "all"
COPIES = "copied", "copied to new memory"
GAPS = "gap with an update", "gap with a file"
REQUESTS, STEPS = 4, 12  # that run, and how many are computed before an update and after it


def stepped(old: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights with the lowest bit of a share of the elements flipped."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in old.items():
        bits = tensor.view(torch.int16)
        flips = torch.rand(bits.shape, generator=generator) < share
        new[name] = (bits ^ flips.to(torch.int16)).view(torch.bfloat16)
    return new


def copied(path: Path) -> dict[str, float]:
    """Return the seconds that copying what a file has takes, into memory in use and into new."""
    held = [tensor.view(-1).view(torch.uint8) for tensor in load_file(path).values()]
    size = sum(map(len, held))

    def copy(memory: mmap.mmap) -> None:
        at = 0
        for tensor in held:
            torch.frombuffer(memory, dtype=torch.uint8, count=len(tensor), offset=at).copy_(tensor)
            at += len(tensor)

    used, new = mmap.mmap(-1, size), mmap.mmap(-1, size)
    copy(used)
    return {
        "copied": clock(partial(copy, used)),
        "copied to new memory": clock(partial(copy, new)),
    }


def plan_to(layout: str) -> tuple[TransferPlan, Layout]:
    """Return the plan from a trainer that has whole tensors to an engine's layout, and its own."""
    target = parse_layout(layout)
    source = layout_of_shards(target.tensors, 1, lambda _, shape, rank: ((0,) * len(shape), shape))
    return TransferPlan(source, target), source


def train(port: int, folder: str, rounds: int, connection: Any) -> None:
    """Change weights and send them, in the order in which :func:`take` receives."""
    torch.set_num_threads(1)
    group = init_weight_transfer("127.0.0.1", port, 0, 2)
    plan, source = plan_to(connection.recv())
    weights = load_file(Path(folder, "model.safetensors"))
    for number in range(rounds):
        for share in SHARES:
            new = stepped(weights, share, number)
            begin = time.perf_counter()
            changes = {name: find_changes(weights[name], new[name]) for name in new}
            found = time.perf_counter() - begin
            for way, after, of in zip(WAYS, ("held", None), (changes, new), strict=True):
                send = partial(send_weights, of, group=group)
                connection.recv()  # the engine is ready
                told = {"found": found, "sent": clock(send)}
                send()
                told["sent by gloo"] = clock(send)
                send()
                if way == "all":
                    boxes = partial(send_boxes, plan, source, new, group=group)
                    told["sent by boxes"] = clock(boxes)
                    boxes()
                path = Path(folder, f"{way}.update.safetensors")
                told["written"] = clock(
                    partial(write_update, path, of, version="held", after=after)
                )
                connection.send(told | copied(path) | {"MB": path.stat().st_size / 1e6})
                send()  # while requests run
                connection.recv()  # nothing is computed here until the engine has measured
            weights = new


@contextmanager
def elsewhere() -> Iterator[None]:
    """Let this process not be on the trainer's host, as far as it is asked."""
    name, shared_memory.host_name = shared_memory.host_name, lambda: "another"
    try:
        yield
    finally:
        shared_memory.host_name = name


def longest_gaps(llm: LLM, update: Callable[[], object]) -> tuple[float, float]:
    """Return the longest time between two steps of running requests, without an update and with.

    The update comes after some steps, and as many follow it.
    """
    times: list[float] = []
    ends = threading.Event()

    def generate() -> None:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [*range(8 * at, 8 * at + 8)]} for at in range(REQUESTS)]
        for _ in llm.serve(prompts, params, every_token=True):
            times.append(time.perf_counter())
            if ends.is_set():
                break

    def wait_for_steps(number: int) -> None:
        wanted = len(times) + number * REQUESTS
        while len(times) < wanted:
            if not thread.is_alive():
                raise RuntimeError("the requests have ended before they were measured")
            time.sleep(0.005)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        wait_for_steps(1)
        first = len(times)
        wait_for_steps(STEPS)
        middle = len(times)
        update()
        wait_for_steps(STEPS)
    finally:
        ends.set()
        thread.join()
    gaps = [after - before for before, after in pairwise(times)]
    return max(gaps[first : middle - 1]), max(gaps[middle - 1 :])


def take(llm: LLM, group: Any, folder: str, connection: Any) -> dict[str, dict[str, float]]:
    """Return the seconds and bytes of one share, by way."""
    plan, _ = plan_to(layout_json(llm.layout()))

    def receive() -> None:
        with receive_weights(src=0, group=group) as weights:
            deque(weights, maxlen=0)

    def update() -> float:
        with receive_weights(src=0, group=group) as weights:
            return clock(partial(llm.update_weights, weights, weight_version="held"))

    def update_by_file() -> tuple[float, float]:
        begin = time.perf_counter()
        with open_update(path) as opened:
            took = time.perf_counter() - begin
            return took, clock(partial(llm.update_weights, opened))

    measured, digests = {}, []
    for way in WAYS:
        path = Path(folder, f"{way}.update.safetensors")
        connection.send("ready")
        receive()
        pauses = {"pause": update()}
        with elsewhere():
            receive()
            pauses["pause by gloo"] = update()
        if way == "all":
            deque(receive_boxes(plan, group=group), maxlen=0)
            arriving = receive_boxes(plan, group=group)
            pauses["pause by boxes"] = clock(
                partial(llm.update_weights, arriving, weight_version="held")
            )
        told = connection.recv()
        pauses["opened"], pauses["pause by file"] = update_by_file()
        gap, pauses["gap with an update"] = longest_gaps(llm, update)
        other, pauses["gap with a file"] = longest_gaps(llm, update_by_file)
        connection.send("measured")
        measured[way] = told | pauses | {"gap": max(gap, other)}
        digests.append(llm.digest().tensors)
    wanted = {name: digest_weight(tensor).hex for name, tensor in load_file(path).items()}
    if digests != [wanted] * len(WAYS):
        raise SystemExit("the engine does not have the trainer's weights: no figures")
    return measured


def over(rounds: list[Any], share: float, way: str, key: str, other: str) -> dict[str, float]:
    """Return the ratio of two figures of a way, by round."""
    return spread([each[share][way][key] / each[share][way][other] for each in rounds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = AutoConfig.for_model("llama", dtype="bfloat16", **CONFIG)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        here, there = processes.Pipe()
        arguments = port, folder, options.rounds + 1, there
        trainer = processes.get_context("spawn").Process(target=train, args=arguments, daemon=True)
        trainer.start()
        with LLM(folder, dtype="bfloat16", kv_cache_memory_bytes=64 << 20) as llm:
            here.send(layout_json(llm.layout()))
            group = init_weight_transfer("127.0.0.1", port, 1, 2)
            rounds = [
                {share: take(llm, group, folder, here) for share in SHARES}
                for _ in range(options.rounds + 1)
            ][1:]  # the first one allocates
        trainer.join()
    result: dict[str, Any] = {}
    for share in SHARES:
        table = {
            way: {
                key: round(statistics.median(each[share][way][key] for each in rounds), 4)
                for key in rounds[0][share][way]
            }
            for way in WAYS
        }
        figures = rounds[0][share]
        shrunk = [key for key in figures["changes"] if key not in ("found", "gap", *COPIES)]
        ratios = {
            key: spread([each[share]["changes"][key] / each[share]["all"][key] for each in rounds])
            for key in shrunk
        }
        sent = [key for key in figures["all"] if key.startswith("sent")]
        of_all = partial(over, rounds, share, "all")
        of_changes = partial(over, rounds, share, "changes")
        result[f"{share:.0%}"] = {
            **table,
            "changes over all": ratios,
            "pause over that by gloo, of all": of_all("pause", "pause by gloo"),
            **{f"over {copy}, of all": {key: of_all(key, copy) for key in sent} for copy in COPIES},
            "over the gap, of all": {key: of_all(key, "gap") for key in GAPS},
            "over the gap, of changes": {key: of_changes(key, "gap") for key in GAPS},
        }
        print(f"{share:.0%}", json.dumps(result[f"{share:.0%}"], indent=1))
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()

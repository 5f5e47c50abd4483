"""What a step of training costs to send to an engine, of the elements that changed and of all.

    python tests/bench/transfer.py [--rounds 5] [--out FILE]

A trainer in a process of its own has bfloat16 weights of 127 million parameters and changes a share
of the elements, drawn evenly. In each round, for each share, it finds the changes ("found") and
sends them in the host's memory, then all tensors: to a receiver that takes them and does nothing
("sent"), to the engine ("pause": the engine computes nothing then), to the engine as if it were on
another host, over gloo ("pause by gloo"), and by a file ("written", "opened" beside the engine's
steps, and its "pause by file"). Each process has one thread.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from machine import clock, machine, spread, write
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM
from vllm_module.base import shared_memory
from vllm_module.weights import (
    find_changes,
    init_weight_transfer,
    open_update,
    receive_weights,
    send_weights,
    write_update,
)

CONFIG = {
    "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
SHARES = 0.01, 0.02, 0.03
WAYS = "changes", "all"


def stepped(old: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights with the lowest bit of a share of the elements flipped."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in old.items():
        bits = tensor.view(torch.int16)
        flips = torch.rand(bits.shape, generator=generator) < share
        new[name] = (bits ^ flips.to(torch.int16)).view(torch.bfloat16)
    return new


def train(port: int, folder: str, rounds: int, connection: Any) -> None:
    """Change weights and send them, in the order in which :func:`take` receives."""
    torch.set_num_threads(1)
    group = init_weight_transfer("127.0.0.1", port, 0, 2)
    weights = load_file(Path(folder, "model.safetensors"))
    for number in range(rounds):
        for share in SHARES:
            new = stepped(weights, share, number)
            begin = time.perf_counter()
            changes = {name: find_changes(weights[name], new[name]) for name in new}
            found = time.perf_counter() - begin
            for way, after, of in zip(WAYS, ("held", None), (changes, new), strict=True):
                sent = clock(partial(send_weights, of, group=group))
                for _ in range(2):
                    send_weights(of, group=group)
                path = Path(folder, f"{way}.update.safetensors")
                written = clock(partial(write_update, path, of, version="held", after=after))
                connection.send((sent, written, path.stat().st_size, found))
            weights = new


def take(llm: LLM, group: Any, folder: str, connection: Any) -> dict[str, dict[str, float]]:
    """Return the seconds and bytes of one share, by way."""
    measured = {}
    for way in WAYS:
        with receive_weights(src=0, group=group) as weights:
            deque(weights, maxlen=0)  # it waits for the trainer, which draws a step
        with receive_weights(src=0, group=group) as weights:
            pause = clock(partial(llm.update_weights, weights, weight_version="held"))
        name, shared_memory.host_name = shared_memory.host_name, lambda: "another"
        with receive_weights(src=0, group=group) as weights:
            over = clock(partial(llm.update_weights, weights, weight_version="held"))
        shared_memory.host_name = name
        sent, written, size, found = connection.recv()
        begin = time.perf_counter()
        with open_update(Path(folder, f"{way}.update.safetensors")) as update:
            opened = time.perf_counter() - begin
            of_file = clock(partial(llm.update_weights, update))
        measured[way] = {
            "MB": size / 1e6, "found": found, "sent": sent, "pause": pause,
            "pause by gloo": over, "written": written,
            "opened": opened, "pause by file": of_file,
        }  # fmt: skip
    return measured


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
        trainer = processes.get_context("spawn").Process(target=train, args=arguments)
        trainer.start()
        with LLM(folder, dtype="bfloat16", kv_cache_memory_bytes=64 << 20) as llm:
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
        gloo = [
            each[share]["all"]["pause"] / each[share]["all"]["pause by gloo"] for each in rounds
        ]
        ratios = {
            key: spread([each[share]["changes"][key] / each[share]["all"][key] for each in rounds])
            for key in rounds[0][share]["all"]
            if key != "found"
        }
        result[f"{share:.0%}"] = {
            **table,
            "changes over all": ratios,
            "pause over that by gloo, of all": spread(gloo),
        }
        print(f"{share:.0%}", json.dumps(result[f"{share:.0%}"], indent=1))
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()

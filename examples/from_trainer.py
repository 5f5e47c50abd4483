"""A trainer in one process sends new weights to a model that runs in another.

They meet at an address, and need no process group of torch's. With several ranks, let every other
one receive: each keeps its own shards.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from pathlib import Path

import torch
from small_checkpoint import write_checkpoint

from vllm_module import LLM, SamplingParams
from vllm_module.weights import init_weight_transfer, receive_weights, send_weights

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def train(port: int, weights: dict[str, torch.Tensor]) -> None:
    """Send the weights after a step of training, which here is noise. In any order, any part."""
    group = init_weight_transfer("127.0.0.1", port, rank=0, world_size=2)
    changed = ((name, weight + 0.1 * torch.randn_like(weight)) for name, weight in weights.items())
    send_weights(changed, group=group)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = write_checkpoint(Path(folder))
        with LLM(folder, device="cpu") as llm:
            prompt = {"prompt_token_ids": [1, 2, 3]}
            (before,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            port = free_port()
            context = multiprocessing.get_context("spawn")
            trainer = context.Process(target=train, args=(port, weights))
            trainer.start()
            group = init_weight_transfer("127.0.0.1", port, rank=1, world_size=2)
            with receive_weights(src=0, group=group) as received:
                llm.update_weights(received)
            trainer.join()
            (after,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    print(f"before {before.outputs[0].token_ids}")
    print(f"after  {after.outputs[0].token_ids}")


if __name__ == "__main__":
    main()

"""FSDP2 trains a model on two processes, and an engine on two others takes its shards each step.

Each rank of the trainer sends the rows that it has to the ranks of the engine that keep them, as a
plan made of both layouts says. No rank gathers a tensor. The engine keeps bfloat16, or FP8 that it
makes of what arrives; after each step it equals an engine that loads the same weights from a file.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import save_file
from small_checkpoint import LLAMA, write_checkpoint
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.distributed import together
from vllm_module.layout import Layout, TransferPlan, layout_of_state_dict

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
PROMPT = {"prompt_token_ids": [1, 2, 3]}
TRAINERS, STEPS = 2, 2


def planned(own: Layout) -> TransferPlan:
    """Return the plan from the trainer's layout to the engine's, on every rank of both."""
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, own)
    return TransferPlan(layouts[0], layouts[TRAINERS])


def train(rank: int, folder: Path) -> None:
    """Take a step on drawn tokens, and send what this rank has."""
    trainers = dist.device_mesh.DeviceMesh("cpu", list(range(TRAINERS)))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=trainers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    layout = layout_of_state_dict(model.state_dict(), trainers.get_group())
    plans = [planned(layout) for _ in ("bfloat16", "fp8")]
    for step in range(STEPS):
        tokens = torch.randint(100, (4, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = model.state_dict()
        for plan in plans:
            together(lambda of=(plan, layout, weights): send_boxes(*of), timeout=60)
        # For the comparison alone: the same weights as a checkpoint.
        full = {name: each.full_tensor() for name, each in weights.items()}
        if rank == 0:
            save_file(full, folder / "model.safetensors", {"format": "pt"})
        dist.barrier()
        dist.barrier()


def serve(folder: Path) -> None:
    """Update both engines after each step, and compare each with one that loads a file."""
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "bfloat16", "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher", "kv_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    kinds = {"bfloat16": settings, "fp8": settings | {"quantization": "fp8_per_channel"}}
    engines = {kind: LLM(str(folder), **given) for kind, given in kinds.items()}
    plans = {kind: planned(llm.layout()) for kind, llm in engines.items()}
    for step in range(STEPS):
        for kind, llm in engines.items():
            arrived = receive_boxes(plans[kind])
            together(lambda of=(llm, arrived): of[0].update_weights(of[1]), timeout=60)
        dist.barrier()
        for kind, llm in engines.items():
            with LLM(str(folder), **kinds[kind]) as fresh:
                (output,), (expected,) = (
                    each.generate(PROMPT, GREEDY, use_tqdm=False) for each in (llm, fresh)
                )
                sample, other = output.outputs[0], expected.outputs[0]
                same = (sample.token_ids, sample.logprobs) == (other.token_ids, other.logprobs)
                same = same and llm.digest() == fresh.digest()
            if dist.get_rank() == TRAINERS:
                print(f"step {step} {kind} {sample.token_ids} equals a load: {same}", flush=True)
        dist.barrier()
    for llm in engines.values():
        llm.close()


def run(rank: int, folder: Path, port: int) -> None:
    world = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}
    dist.init_process_group("gloo")
    if rank < TRAINERS:
        train(rank, folder)
    else:
        serve(folder)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        write_checkpoint(Path(name), LLAMA | {"model_type": "llama", "dtype": "bfloat16"})
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        # The ranks are forked from one process that has imported what they need.
        processes.set_forkserver_preload(
            ["transformers.models.llama.modeling_llama", "vllm_module"]
        )
        processes.start_processes(run, (Path(name), port), 4, start_method="forkserver")


if __name__ == "__main__":
    main()

"""A program of torchrun on two hosts: ``hosts_program.py SPEC``.

It prints a line of JSON for each answer: the weights' name, and tokens. With ``moment`` it updates
weights or moves experts between answers, until there is a file ``finish``.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vllm_module import LLM, LoadConfig, SamplingParams


def main(spec: dict[str, Any]) -> None:
    llm = LLM(
        "model",
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=1 << 20,
        skip_tokenizer_init=True,
        load_config=LoadConfig(timeout=spec["timeout"], show_progress=False),
        step_timeout=spec["step_timeout"],
        tensor_parallel_size=spec["tp"],
        pipeline_parallel_size=spec["pp"],
        enable_expert_parallel=spec["experts"],
        enable_eplb=spec["experts"],
        num_redundant_experts=1 if spec["experts"] else 0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    draw, name = random.Random(spec["seed"]), "model"
    with llm:
        for count in itertools.count(1):
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            sys.stdout.write(json.dumps({"weights": name, "tokens": tokens}) + "\n")
            sys.stdout.flush()
            if Path("finish").exists():
                return
            if spec["moment"] == "updates":
                name = ["model", "other"][count % 2]
                llm.update_weights(load_file(f"{name}/model.safetensors"))
            elif spec["moment"] == "moves":
                old = llm.expert_placements()
                places = {path: drawn(draw, old[path]) for path in old}
                llm.rearrange_experts(placements=places)


def drawn(draw: random.Random, placement: tuple[int, ...]) -> list[int]:
    """Return a placement of as many places on two ranks, without an expert twice on one."""
    experts, half = 1 + max(placement), len(placement) // 2

    def tries() -> Iterator[list[int]]:
        while True:
            more = draw.sample(range(experts), k=len(placement) - experts)
            yield draw.sample([*range(experts), *more], k=len(placement))

    return next(
        each
        for each in tries()
        if all(len({*held}) == len(held) for held in (each[:half], each[half:]))
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

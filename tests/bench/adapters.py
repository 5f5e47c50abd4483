"""What LoRA adapters cost: tokens a second of a batch with adapters over those of the base alone.

    python tests/bench/adapters.py [--shape 58M] [--requests 32] [--adapters 8] [--rank 16]

All linear layers of a shape of ``engine.py`` are adapted. Both ways take turns on one engine.
Requests of the base give the same tokens in both, or no number is printed. Also measured: loading
an adapter, over reading its file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import plausible, shapes_of, write_qwen3
from engine import SHAPES, shown
from machine import clock, machine, over, rounds, spread, write
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    """Write an adapter of all linear layers in PEFT's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        if name.removesuffix(".weight").endswith(PARTS):
            path = f"base_model.model.{name.removesuffix('.weight')}"
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = torch.randn(size, generator=generator) / size[1] ** 0.5
                tensors[f"{path}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"r": rank, "lora_alpha": rank, "target_modules": list(PARTS)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def generate(llm: LLM, prompts: list[list[int]], names: list[str | None], count: int) -> Any:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.engine.scheduler.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=names)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="58M")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        base = write_qwen3(folder / "base", values=plausible, **SHAPES[given.shape])
        config = json.loads((base / "config.json").read_text())
        llm = LLM(
            str(base), dtype="float32", max_model_len=64, max_num_seqs=given.requests,
            kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True, max_loras=given.adapters,
        )  # fmt: skip
        draw = random.Random(0)
        prompts = [[draw.randrange(2, 32000) for _ in range(8)] for _ in range(given.requests)]
        plain: list[str | None] = [None] * given.requests
        before = generate(llm, prompts, plain, given.tokens)
        names = [f"adapter-{number}" for number in range(given.adapters)]
        loaded = names + [f"another-{number}" for number in range(given.loads - given.adapters)]
        for number, name in enumerate(loaded):
            write_adapter(folder / name, config, given.rank, number)
        loads = {"load": [], "read": []}  # type: dict[str, list[float]]
        kept = []  # what was read, too: both take new memory
        for number, name in enumerate(loaded):
            file = folder / name / "adapter_model.safetensors"

            def read(file: Path = file) -> None:
                kept.append([each.clone() for each in load_file(file).values()])

            # In turn first, because the second one finds the file in the processor's cache.
            ways = {"load": partial(llm.load_adapter, name, folder / name), "read": read}
            for way in sorted(ways, reverse=bool(number % 2)):
                loads[way].append(clock(ways[way]))
        first = loads["load"].pop(0) / loads["read"].pop(0)
        # The base has a place in the rotation, as one more adapter.
        rotation = [None, *names]
        asked = [rotation[index % len(rotation)] for index in range(given.requests)]
        after = generate(llm, prompts, asked, given.tokens)
        for name, one, other in zip(asked, before, after, strict=True):
            if (name is None) != (one == other):
                raise SystemExit(f"tokens of {name or 'the base'} are wrong: no figures")
        works = {
            "base": partial(generate, llm, prompts, plain, given.tokens),
            "adapters": partial(generate, llm, prompts, asked, given.tokens),
        }
        seconds = rounds(works, given.rounds)
    ratio = spread(over(seconds, "base", "adapters"))
    load = spread([a / b for a, b in zip(loads["load"], loads["read"], strict=True)])
    print(f"tokens a second with adapters over the base's: {shown(ratio)}")
    print(f"loading an adapter of {given.rank} over reading its file: {shown(load)}; ", end="")
    print(f"the first of its kind {first:.1f}")
    if given.out:
        settings = {k: v for k, v in vars(given).items() if k != "out"}
        write(given.out, {"settings": settings, "tokens": ratio, "load": load, "first": first})


if __name__ == "__main__":
    main()

"""Quantized weights on a CPU: products and tokens, before and after their codes are multiplied.

    python tests/bench/code_rows.py [--out tests/bench/results/code_rows.json]

Products of the sizes of the 58M shape's and Qwen3-0.6B's layers, beside float32 and what torch has
for such weights. Then tokens of an engine with the 58M shape, or another: float32, and each way of
quantizing with weights that are dequantized before each product and pages that are copied
("before"), and as the engine has chosen ("after"), in turns. A figure is printed only if products
are within their bound of the dequantized weight's in float64, and both ways give the same tokens in
float32.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import plausible, write_qwen3
from engine import SHAPES, ours, shown
from formats import write_gguf
from machine import machine, over, rounds, spread, write
from safetensors.torch import load_file
from torch.nn import functional as F

from vllm_module import LLM, QuantizationConfig
from vllm_module.kernels.experts.grouped_matmul import by_expert, grouped_matmul
from vllm_module.kernels.experts.grouped_matmul_packed import grouped_matmul_packed
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert
from vllm_module.kernels.matmul.code_rows_matmul import fastest_code_rows
from vllm_module.kernels.matmul.gguf_blocks import blocks_matmul
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul

CODES = Products(codes=1 << 30)
SIZES = (512, 3072), (1536, 512), (1024, 6144)  # inputs and outputs
ROWS = 1, 8, 32
INT8, INT4 = "int8_per_channel_weight_only", "int4_per_group"
QUANTIZED: dict[str, Any] = {  # with a head in float32, tied or not, and with a quantized one
    "int8": INT8,
    "int4": INT4,
    "int8 and head": QuantizationConfig(scheme=INT8, overrides={"lm_head": INT8}),
    "int4 and head": QuantizationConfig(scheme=INT4, overrides={"lm_head": INT4}),
    "Q8_0": None,
}
FLOATS = "float32", "bfloat16"
NARROW = " in bfloat16"  # the same, with inputs of a model in that
AWQ = 0, 4, 1, 5, 2, 6, 3, 7
EXPERTS, TOP_K = 8, 2
Product = Callable[[torch.Tensor], torch.Tensor]


def of_codes(inputs: int, outputs: int) -> dict[str, Product]:
    """Return our products with random weights."""
    eight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32)
    q8, q4 = (
        torch.randint(256, (outputs, inputs // 32, size), dtype=torch.uint8) for size in (34, 18)
    )
    k4, k6 = (
        torch.randint(256, (outputs, inputs // 256, size), dtype=torch.uint8) for size in (144, 210)
    )
    for blocks, at in ((q8, 1), (q4, 1), (k4, 1), (k4, 3), (k6, 209)):
        blocks[..., at] = 0x20  # scales of about 0.01
    scale, scales = torch.rand(outputs, 1), torch.rand(outputs, inputs // 128)
    down = words.view(outputs // 8, inputs)
    anywhere = (torch.randperm(inputs) // 128).int()
    return {
        "int8": lambda x: scaled_matmul(x, eight, scale, (1, inputs)),
        "int4": lambda x: packed_matmul(x, words, scales, Packing(4), 128),
        "Q8_0": lambda x: blocks_matmul(x, q8, "Q8_0"),
        "Q4_0": lambda x: blocks_matmul(x, q4, "Q4_0"),
        "Q4_K": lambda x: blocks_matmul(x, k4, "Q4_K"),
        "Q6_K": lambda x: blocks_matmul(x, k6, "Q6_K"),
        "AWQ": lambda x: packed_matmul(x, down, scales, Packing(4, 0, AWQ), 128),
        "GPTQ by activation": lambda x: packed_matmul(
            x, words, scales, Packing(4), 128, group_of=anywhere
        ),
    }


def of_experts(inputs: int, outputs: int) -> dict[str, Product]:
    """Return products of all rows with the weights of two of eight experts each."""
    eight = torch.randint(-128, 128, (EXPERTS, outputs, inputs), dtype=torch.int8)
    words = torch.randint(-(2**31), 2**31, (EXPERTS, outputs, inputs // 8), dtype=torch.int32)
    blocks = torch.randint(256, (EXPERTS, outputs, inputs // 32, 18), dtype=torch.uint8)
    blocks[..., 1] = 0x20
    scale = torch.rand(EXPERTS, outputs, 1)
    scales = torch.rand(EXPERTS, outputs, inputs // 128)
    wide = torch.randn(EXPERTS, outputs, inputs)

    def sorted_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        chosen = torch.rand(len(x), EXPERTS, generator=draw).topk(TOP_K).indices.int()
        return sort_by_expert(chosen, 0, EXPERTS)

    def q4_0(x: torch.Tensor) -> torch.Tensor:
        rows, offsets = sorted_rows(x)

        def product(expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return blocks_matmul(x, blocks[expert], "Q4_0", bias)

        return by_expert(x, product, outputs, offsets, None, rows, TOP_K)

    def grouped(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        rows, offsets = sorted_rows(x)
        return grouped_matmul(x, weight, offsets, rows=rows, top_k=TOP_K, **options)

    def int4(x: torch.Tensor) -> torch.Tensor:
        rows, offsets = sorted_rows(x)
        return grouped_matmul_packed(
            x, words, scales, Packing(4), 128, offsets, rows=rows, top_k=TOP_K
        )

    return {
        "float32": lambda x: grouped(x, wide),
        "int8": lambda x: grouped(x, eight, scale=scale),
        "int4": int4,
        "Q4_0": q4_0,
    }


def of_torch(inputs: int, outputs: int) -> dict[str, Product]:
    """Return torch's products, some of which round the input to bfloat16 or to eight bits."""
    weight = torch.randn(outputs, inputs)
    eight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes = torch.randint(16, (outputs, inputs), dtype=torch.int32)
    four = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.rand(inputs // 128, outputs, 2)
    narrow, ones = both.bfloat16(), torch.ones(outputs, dtype=torch.bfloat16)
    wide = ones.float()
    return {
        "float32": lambda x: F.linear(x, weight),
        "int8pack, bfloat16": lambda x: torch._weight_int8pack_mm(x.bfloat16(), eight, ones),
        "int8pack, float32": lambda x: torch._weight_int8pack_mm(x, eight, wide),
        "int4pack, bfloat16": lambda x: torch._weight_int4pack_mm_for_cpu(
            x.bfloat16(), four, 128, narrow
        ),
        "int4pack, float32": lambda x: torch._weight_int4pack_mm_for_cpu(x, four, 128, both),
    }


@torch.inference_mode()
def single(inputs: int, outputs: int, rows: int, n: int) -> dict[str, dict[str, float]]:
    """Return microseconds of products: the median, the least and the greatest."""
    x = torch.randn(rows, inputs)
    works: dict[str, Any] = {
        name: partial(product, x)
        for name, product in of_torch(inputs, outputs).items()
        if rows == 1 or not name.endswith("pack, float32")  # which take seconds
    }
    for name, product in of_codes(inputs, outputs).items():
        weight = product(torch.eye(inputs)).double().T  # more rows than any choice takes
        with products(CODES):
            error = (product(x).double() - x.double() @ weight.T).abs()
        bound = (inputs + 4) * 2.0**-24 * (x.double().abs() @ weight.abs().T)
        if not bool((error <= bound).all()):
            raise SystemExit(f"{name} {inputs}x{outputs} of {rows} rows is wrong: no figures")
        works[f"{name} before"] = partial(product, x)
        works[f"{name} after"] = partial(_by_codes, product, x)
    for work in works.values():
        work()
    seconds = rounds(works, n)
    return {name: spread([each * 1e6 for each in seconds[name]]) for name in seconds}


@torch.inference_mode()
def experts(inputs: int, outputs: int, rows: int, n: int) -> dict[str, dict[str, float]]:
    """Return microseconds of products with experts: the median, the least and the greatest."""
    x, works = torch.randn(rows, inputs), dict[str, Any]()
    for name, product in of_experts(inputs, outputs).items():
        works[f"{name} before"] = partial(product, x)
        if name == "float32":
            works[name] = works.pop("float32 before")
            continue
        works[f"{name} after"] = partial(_by_codes, product, x)
        before, after = (works[f"{name} {way}"]() for way in ("before", "after"))
        if not bool(((before - after).norm() <= 1e-5 * before.norm()).all()):
            raise SystemExit(f"experts in {name} are wrong: no figures")
    seconds = rounds(works, n)
    return {name: spread([each * 1e6 for each in seconds[name]]) for name in seconds}


def _by_codes(product: Product, x: torch.Tensor) -> torch.Tensor:
    with products(CODES):
        return product(x)


def engines(folder: Path, shape: str, n: int, requests: int, tokens: int) -> dict[str, Any]:
    """Return tokens a second of engines that take turns."""
    plain = write_qwen3(folder / "plain", values=plausible, **SHAPES[shape])
    blocks = gguf_of(plain, folder)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 32000) for _ in range(8)] for _ in range(requests)]
    works: dict[str, Any] = {}
    chose = {}
    narrow = {name + NARROW: scheme for name, scheme in QUANTIZED.items()}
    for name, scheme in {**dict.fromkeys(FLOATS), **QUANTIZED, **narrow}.items():
        llm = LLM(
            blocks if name.startswith("Q8_0") else plain,
            dtype="bfloat16" if name.endswith("bfloat16") else "float32",
            max_model_len=64, max_num_seqs=32, quantization=scheme,
            kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True,
        )  # fmt: skip
        chosen = chose[name] = llm.executor.products
        before = chosen._replace(floats=range(0), codes=0, pages=False)
        given = []
        for way, of in (("before", before), ("after", chosen)):
            works[f"{name} {way}"] = partial(_tokens, llm, of, prompts, tokens)
            given.append(works[f"{name} {way}"]())
        # In bfloat16, torch rounds sums otherwise, and the loops round weights.
        if given[0] != given[-1] and not name.endswith("bfloat16"):
            raise SystemExit(f"{name} gives other tokens in the loops: no figures")
    seconds = rounds(works, n)
    per_second = {
        name: spread([requests * tokens / each for each in seconds[name]]) for name in seconds
    }
    ratios = {
        f"{name} after to {peer}": spread(over(seconds, peer, f"{name} after"))
        for name in chose
        for peer in dict.fromkeys((f"{name} before", "float32 before", "float32 after"))
        if peer != f"{name} after"
    }
    chosen_by = {name: str(each) for name, each in chose.items()}
    return {"tokens_per_second": per_second, "ratios": ratios, "chosen": chosen_by}


def gguf_of(plain: Path, folder: Path) -> Path:
    """Write the model as a GGUF file with blocks of Q8_0, and return its path."""
    (folder / "gguf").mkdir()
    whole = json.loads((plain / "config.json").read_text())
    tensors = {k: v for file in plain.glob("*.safetensors") for k, v in load_file(file).items()}
    write_gguf(folder / "gguf" / "model.gguf", whole, tensors)
    return folder / "gguf" / "model.gguf"


def _tokens(llm: LLM, way: Products, prompts: list[list[int]], count: int) -> list[list[int]]:
    llm.engine.scheduler.reset_prefix_cache()
    llm.executor.products = way
    return ours(llm, prompts, [count] * len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--shape", choices=SHAPES, default="58M")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    results: dict[str, Any] = {"chosen": fastest_code_rows(torch.get_num_threads())}
    for size in SIZES:
        for rows in arguments.rows:
            found = single(*size, rows, 10 * arguments.rounds)
            results[f"{rows}x{size[0]} by {size[0]}x{size[1]}, microseconds"] = found
            shortest = {name: round(each["least"]) for name, each in found.items()}
            print(f"{rows} rows, {size}, least microseconds: {shortest}", flush=True)
    for rows in arguments.rows:
        found = experts(512, 1536, rows, 10 * arguments.rounds)
        results[f"{rows} rows of experts, microseconds"] = found
        middle = {name: round(each["median"]) for name, each in found.items()}
        print(f"{rows} rows, two of eight experts of 512x1536, medians: {middle}", flush=True)
    for requests in arguments.requests:
        with tempfile.TemporaryDirectory() as directory:
            found = engines(
                Path(directory), arguments.shape, arguments.rounds, requests, arguments.tokens
            )
        results[f"{arguments.shape}, {requests} requests"] = found
        medians = {k: round(v["median"], 1) for k, v in found["tokens_per_second"].items()}
        print(f"{requests} requests: {medians}")
        print({name: shown(each) for name, each in found["ratios"].items()}, flush=True)
    results["threads"] = torch.get_num_threads()
    if arguments.out:
        write(arguments.out, results)


if __name__ == "__main__":
    main()

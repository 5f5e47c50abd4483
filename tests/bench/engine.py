"""The engine against transformers' generate: the same model, prompts and tokens, in one run.

    python tests/bench/engine.py [--shapes 3M 58M 0.6B mamba2 hybrid next mixtral]
        [--out tests/bench/results/engine.json]

mamba2, hybrid (Bamba) and next (Qwen3-Next) are models of some millions of parameters with
recurrent state; mixtral has 112 million, most of them in experts.
Refuses to print a number unless both give the same tokens. The engine takes turns with transformers
twice: with the products that it chose on this processor, and with torch's own, which transformers
has. Also measures what a step of 64 sequences costs without the model (scheduling, laying out,
choosing tokens), what each way of sampling costs, oneDNN's products beside torch's, and memory over
a soak of 10,000 requests.
Qwen3-0.6B's shape takes some 20 minutes and 8 GB.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import QWEN3, plausible, write_qwen3
from machine import clock, machine, over, rounds, spread, write
from stepping import steps, unchanged
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul.linear import fastest_products, linear
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.sampler import sample
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import StepInputs

SHAPES: dict[str, dict[str, Any]] = {
    "3M": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 6,
        "vocab_size": 8000,
        "torch_dtype": "float32",
    },
    "58M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
        "torch_dtype": "float32",
    },
    "0.6B": {"num_hidden_layers": 28, "tie_word_embeddings": True, "torch_dtype": "float32"},
}
# Models with recurrent state, by transformers' names of their entries.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 256, "num_hidden_layers": 8, "num_heads": 16,
        "head_dim": 32, "state_size": 64, "n_groups": 1, "vocab_size": 8000,
    },
    "hybrid": {
        "model_type": "bamba", "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "attn_layer_indices": [3, 7], "mamba_n_heads": 16, "mamba_d_head": 32,
        "mamba_d_state": 64, "mamba_n_groups": 1, "max_position_embeddings": 512,
        "vocab_size": 8000,
    },
    "next": {
        "model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "max_position_embeddings": 512, "vocab_size": 8000,
    },
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
        "max_position_embeddings": 4096, "vocab_size": 32000,
    },
}  # fmt: skip
OTHERS = RECURRENT | EXPERTS  # which transformers writes
STATEFUL = [shape["model_type"] for shape in RECURRENT.values()]
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
ROUNDS = 5
ONEDNN = Products(one=True, few=True, many=True)


def write_model(size: str, folder: Path) -> Path:
    """Write the checkpoint of a shape, with plausible values."""
    if size not in OTHERS:
        return write_qwen3(folder, values=plausible, **SHAPES[size])
    config = AutoConfig.for_model(**OTHERS[size], **SPECIAL_TOKENS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # What decides decays stays as transformers draws it.
        if parameter.dim() >= 2 and (parameter.dim() == 2 or size in EXPERTS):
            rows = parameter.data.flatten(0, -2)
            rows.copy_(plausible(tuple(rows.shape), generator))
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def theirs(model: Any, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Generate by transformers: one batch, padded on the left, as long as its longest output."""
    longest, count = max(map(len, prompts)), max(counts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        # transformers has no static cache of recurrent states.
        cache_implementation=None if model.config.model_type in STATEFUL else "static",
        disable_compile=True,
        pad_token_id=0,
    )
    new = output[:, longest:].tolist()
    return [tokens[:n] for tokens, n in zip(new, counts, strict=True)]


def ours(llm: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def compare(
    llm: LLM, model: Any, prompts: list[list[int]], counts: list[int], n: int
) -> dict[str, Any]:
    """Time all in turns, after checking that they give the same tokens."""
    expected = theirs(model, prompts, counts)
    chosen = llm.executor.products

    def work(way: Products) -> list[list[int]]:
        llm.engine.scheduler.reset_prefix_cache()  # no prompt is cached
        llm.executor.products = way
        return ours(llm, prompts, counts)

    ways = {"chosen": chosen, "torch": Products()}
    for way in ways.values():
        others = sum(a != b for a, b in zip(expected, work(way), strict=True))
        if others:
            raise SystemExit(f"{others} of {len(prompts)} requests give other tokens: no figures")
    works: dict[str, Any] = {name: partial(work, way) for name, way in ways.items()}
    seconds = rounds(works | {"transformers": partial(theirs, model, prompts, counts)}, n)
    llm.executor.products = chosen
    tokens = sum(counts)
    per_second = {name: tokens / statistics.median(each) for name, each in seconds.items()}
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": tokens,
        "tokens_per_second": per_second["chosen"],
        "transformers_tokens_per_second": per_second["transformers"],
        "ratio": spread(over(seconds, "transformers", "chosen")),
        "ratio_with_torchs_products": spread(over(seconds, "transformers", "torch")),
        "seconds": seconds,
    }


def generate(size: str, n: int, generator: random.Random) -> dict[str, Any]:
    """Compare the engine with transformers on a shape, with one request and with many."""
    vocab = (SHAPES | OTHERS)[size].get("vocab_size", QWEN3["vocab_size"])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = write_model(size, Path(directory))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # It would end there; min_new_tokens would choose another token, which takes time, too.
        model.generation_config.eos_token_id = None
        with LLM(folder, dtype="float32", max_model_len=512, max_num_seqs=64) as llm:
            results["parameters"] = sum(each.numel() for each in model.parameters())
            results["state bytes of a sequence"] = llm.executor.worker.state_bytes
            for name, count, least, most in (
                ("1 request", 1, 32, 32),
                ("32 requests of 32 new tokens each", 32, 32, 32),
                ("32 requests of 8 to 128 new tokens", 32, 8, 128),
            ):
                prompts = [
                    [generator.randrange(2, vocab) for _ in range(generator.randrange(8, 257))]
                    for _ in range(count)
                ]
                counts = [generator.randint(least, most) for _ in range(count)]
                results[name] = result = compare(llm, model, prompts, counts, n)
                print(
                    f"{size}, {name}: {result['tokens_per_second']:.0f} tokens/s, "
                    f"{shown(result['ratio'])} times transformers', with torch's products "
                    f"{shown(result['ratio_with_torchs_products'])}",
                    flush=True,
                )
    return results


def product(rows: int, columns: int, out: int) -> dict[str, Any]:
    """Return the times of oneDNN's product and torch's, after checking that they agree."""
    x, weight = torch.randn(rows, columns), torch.randn(out, columns)
    with torch.inference_mode(), products(ONEDNN):
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-4, atol=1e-3)
        works = {"onednn": partial(linear, x, weight), "torch": partial(F.linear, x, weight)}
        seconds = rounds(works, 50)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return medians | {"ratio": spread(over(seconds, "torch", "onednn"))}


def overhead(sequences: int, vocab: int) -> dict[str, float]:
    """Return microseconds a step without a model: its logits are there already."""
    logits = torch.randn(sequences, vocab)
    device = torch.device("cpu")
    runner = ModelRunner(_Nothing(logits), device, sequences, 20)  # type: ignore[arg-type]

    def execute(inputs: StepInputs) -> torch.Tensor:
        return runner.run(inputs)

    scheduler = Scheduler(PagePool(20 * sequences, 16), PagePool(0, 16), sequences, 1 << 20)
    engine = Engine(execute, scheduler, vocab, 4096)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [
        engine.add(str(index), [index % 7] * (50 + index), params) for index in range(sequences)
    ]
    # Reading the logits once is the least that choosing tokens costs.
    seconds: dict[str, list[float]] = {"step": [], "read": []}
    for step in islice(steps(engine, requests), 10, 190):
        seconds["step"].append(step.seconds)
        seconds["read"].append(clock(logits.sum))
    return {name: statistics.median(each) * 1e6 for name, each in seconds.items()} | {
        "least": min(seconds["step"]) * 1e6
    }


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "penalties, greedy": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs 5, greedy": {"temperature": 0, "logprobs": 5},
}


def sampling(sequences: int, vocab: int) -> dict[str, dict[str, float]]:
    """Return what choosing tokens takes, in times of reading the logits once.

    Refuses if a row gets another token in the batch than alone. A sequence has 500 tokens.
    """
    draw = random.Random(0)
    logits = torch.randn(sequences, vocab)
    # As in a trained model, few tokens have most of the probability.
    logits.scatter_add_(1, torch.randint(vocab, (sequences, 20)), torch.full((sequences, 20), 14.0))
    works: dict[str, Any] = {"read": logits.sum}
    for name, values in SAMPLING.items():
        params = SamplingParams(**values)
        ids = [[draw.randrange(vocab) for _ in range(500)] for _ in range(sequences)]
        rows = [Row(params, ids[i], 300, draw.random(), (), i) for i in range(sequences)]
        counts = TokenCounts()
        works[name] = partial(_sampled, logits, rows, counts)
        for row, together in list(enumerate(works[name]()))[::16]:
            if _sampled(logits[row : row + 1], rows[row : row + 1]) != [together]:
                raise SystemExit(f"{name}: row {row} is sampled differently alone: no figures")
    seconds = rounds(works, 15)
    return {name: spread(over(seconds, name, "read")) for name in SAMPLING}


def _sampled(*arguments: Any) -> list[Any]:
    return sample(*arguments).read()


def soak(requests: int) -> dict[str, Any]:
    """Serve ``requests``, a quarter of them cancelled; return the memory this process then has.

    It swaps, preempts and shares prefixes all the time, in a cache of few pages.
    """
    shape = SHAPES["3M"] | {"num_hidden_layers": 2, "vocab_size": 512}
    draw = random.Random(0).randrange
    resident = []
    with tempfile.TemporaryDirectory() as directory:
        folder = write_qwen3(Path(directory), values=plausible, **shape)
        options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "swap_space": 2**-11}
        with LLM(folder, max_model_len=512, max_num_seqs=32, **options) as llm:
            engine = llm.engine

            def coming() -> Iterator[Request]:
                for index in range(requests):
                    prompt = [draw(2) for _ in range(1 + draw(64))]
                    params = SamplingParams(
                        temperature=draw(2), max_tokens=1 + draw(16), n=1 + draw(2), ignore_eos=True
                    )
                    yield engine.add(str(index), prompt, params)
                    if not draw(4):
                        engine.abort(str(index - draw(20)))
                    if index % (requests // 10) == requests // 10 - 1:
                        resident.append(resident_bytes())

            for _ in engine.serve(coming(), unchanged, concurrency=24):
                pass
            pool, host = engine.scheduler.pool, engine.scheduler.host
            if (pool.free_pages, host.free_pages) != (pool.num_pages, host.num_pages):
                raise SystemExit("pages are held after the last request: no figures")
            preempted = engine.scheduler.preemptions
    return {"requests": requests, "preemptions": preempted, "resident_bytes": resident}


def resident_bytes() -> int:
    """Return what this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Nothing:
    """A model that takes no time: its logits are the same every time."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return ids.unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(hidden)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES | OTHERS, default=["3M", "58M"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    generator = random.Random(0)

    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    results: dict[str, Any] = {
        "transformers": transformers.__version__,
        "shapes": SHAPES | OTHERS,
    }
    results["chosen products"] = [str(fastest_products()) for _ in range(ROUNDS)]
    print(f"oneDNN is chosen, asked {ROUNDS} times: {results['chosen products']}")
    for rows, columns, out in ((1, 1024, 6144), (32, 1024, 6144), (512, 1024, 6144)):
        shape = f"{rows}x{columns} by {columns}x{out}"
        figures = product(rows, columns, out)
        results[f"product {shape}"] = figures
        print(f"a float32 product {shape}: oneDNN is {shown(figures['ratio'])} times as fast")

    for size in arguments.shapes:
        results[size] = generate(size, max(1, arguments.rounds), generator)
    for vocab in (1000, 32000, 151936):
        figures = overhead(64, vocab)
        results[f"overhead of a step of 64, vocabulary {vocab}"] = figures
        print(
            f"a step of 64 without the model, vocabulary {vocab}: {figures['step']:.0f} µs "
            f"(least {figures['least']:.0f}); to read the logits once {figures['read']:.0f} µs"
        )
    for vocab in (32000, 151936):
        figures = sampling(64, vocab)
        results[f"sampling 64, vocabulary {vocab}"] = figures
        for name, ratios in figures.items():
            print(f"64 tokens of {vocab}, {name}: {shown(ratios)} times reading the logits")
    figures = soak(10_000)
    results["soak"] = figures
    first, *_, last = (each / 2**20 for each in figures["resident_bytes"])
    print(
        f"soak: {figures['requests']} requests, {figures['preemptions']} preemptions; "
        f"{first:.1f} MiB resident after a tenth of them, {last:.1f} after all"
    )
    if arguments.out:
        write(arguments.out, results)


def shown(ratios: dict[str, float]) -> str:
    return f"{ratios['median']:.2f} ({ratios['least']:.2f} to {ratios['greatest']:.2f})"


if __name__ == "__main__":
    main()

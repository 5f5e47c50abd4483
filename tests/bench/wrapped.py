"""Our own models and their wrapped twins: time to load, time of a token, and bytes of a rank.

The logits of each pair are compared first. Bytes are those that rank 0 of 8 reads of the
checkpoint, over the bytes that it then keeps.

    python tests/bench/wrapped.py [--out tests/bench/results/wrapped.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import over, rounds, spread
from machine import write as write_results

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.held import load_from
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import tensor_parallel

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 64, "sliding_window": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "moe_intermediate_size": 256},
}
IMPLS = ("native", "transformers")
ROUNDS, TOKENS = 5, 64
_IDS = (torch.arange(24) * 37 + 5) % 4096


def write(folder: str, kind: str) -> None:
    """Write a random model of type ``kind``, of some tens of millions of parameters."""
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **KINDS[kind])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def loaded(folder: str, impl: Any) -> tuple[Any, int]:
    """Return this rank's model and the bytes that it read."""
    config = ModelConfig(model=folder, model_impl=impl, dtype="float32", max_model_len=256)
    source = ModelSource.find(config)
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        load_from(model, checkpoint)
        return model, checkpoint.bytes_read


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model.compute_logits(model(_IDS, torch.arange(len(_IDS))))
    return result


def generate(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)


def over_kept(folder: str, impl: str) -> float:
    """Return the bytes that rank 0 of 8 reads, over those of the parameters that it keeps."""
    with tensor_parallel(rank=0, size=8):
        model, read = loaded(folder, impl)
    return read / sum(parameter.nbytes for parameter in {*model.parameters()})


def measure(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(folder, kind)
        native, wrapped = (logits(loaded(folder, impl)[0]) for impl in IMPLS)
        torch.testing.assert_close(wrapped, native, rtol=0, atol=1e-4 * float(native.abs().max()))
        load = rounds({impl: partial(loaded, folder, impl) for impl in IMPLS}, ROUNDS)
        llms = {
            impl: LLM(
                folder, model_impl=impl, dtype="float32", max_model_len=256, device="cpu",
                skip_tokenizer_init=True,
            )
            for impl in IMPLS
        }  # fmt: skip
        tokens = rounds({impl: partial(generate, llms[impl]) for impl in IMPLS}, ROUNDS)
        for llm in llms.values():
            llm.close()
        return {
            "load, wrapped over native": spread(over(load, *reversed(IMPLS))),
            "tokens, wrapped over native": spread(over(tokens, *reversed(IMPLS))),
            "seconds to load": {impl: spread(load[impl]) for impl in IMPLS},
            f"seconds of {TOKENS} tokens": {impl: spread(tokens[impl]) for impl in IMPLS},
            "bytes read over kept, rank 0 of 8": {impl: over_kept(folder, impl) for impl in IMPLS},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    for kind in KINDS:
        results[kind] = measure(kind)
        print(f"{kind}: {json.dumps(results[kind], indent=1)}", flush=True)
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()

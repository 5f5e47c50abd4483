"""Job: transformers' generate, with the shapes and the numbers of requests of our engine."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.device import Gpu
from gpu.engine import PROMPT
from gpu.models import shape
from gpu.worker import Emit


@torch.inference_mode()
def main(emit: Emit, device: Gpu, model: str, requests: list[int]) -> None:
    transformers.utils.logging.set_verbosity_error()
    entries = shape(model, device.dry)
    config = AutoConfig.for_model(**{k: v for k, v in entries.items() if k != "torch_dtype"})
    with torch.device(device.name):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt, steps, rounds = (6, 2, 1) if device.dry else (PROMPT, 16, 2)
    for count in requests:
        ids = torch.randint(config.vocab_size, (count, prompt), device=device.name)

        def seconds(new: int, ids: torch.Tensor = ids) -> float:
            device.synchronize()
            begin = time.perf_counter()
            module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                            min_new_tokens=new, do_sample=False, pad_token_id=0)  # fmt: skip
            device.synchronize()
            return time.perf_counter() - begin

        seconds(2)
        first = statistics.median(seconds(1) for _ in range(rounds))
        whole = statistics.median(seconds(1 + steps) for _ in range(rounds))
        step = max(1e-9, (whole - first) / steps)
        figures: dict[str, Any] = {"first_token": first, "step": step}
        emit(name=f"transformers, {model}, {count} requests", model=model, requests=count,
             **figures, tokens_per_second=count / step)  # fmt: skip

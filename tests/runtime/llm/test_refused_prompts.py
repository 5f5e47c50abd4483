"""Prompts that cannot be served, beside others that can."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from vllm_module import LLM, SamplingParams
from vllm_module.runtime.text.tokenizer import Tokenizer

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
write_tokenizer, SMALL, greedy, ids_of = (
    ASKING[name] for name in ("write_tokenizer", "SMALL", "greedy", "ids_of")
)


@pytest.mark.parametrize(
    "prompt",
    [5, None, [1, True], b"abc", {"prompt": 3}, {"prompt_token_ids": [1], "image": 0}, "\ud83d"],
)
def test_an_invalid_prompt_changes_no_other(llm: LLM, prompt: Any) -> None:
    """Its own output has the error, and no request is left in the engine."""
    outputs = llm.generate(["fine", prompt, "too"], greedy(3), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 0, 3]
    assert outputs[1].error is not None
    assert "surrogate" in outputs[1].error or "a prompt should be text, a list" in outputs[1].error
    with pytest.raises(ValueError, match=r"a prompt should be|surrogate"):
        next(llm.stream(prompt))
    assert not llm.engine.requests


def test_arguments_of_another_type_are_refused(llm: LLM) -> None:
    for prompts in (None, 5, b"abc"):
        with pytest.raises(ValueError, match="prompts should be one or a sequence of them, got"):
            llm.generate(prompts, use_tqdm=False)  # type: ignore[arg-type]
    for params in ({"temperature": 0}, [greedy(1), 3], "x"):
        with pytest.raises(ValueError, match=r"sampling_params should be|there are 1 sampling"):
            llm.generate(["a", "b"], params, use_tqdm=False)  # type: ignore[arg-type]
    (_, default) = llm.generate(["a", "b"], [greedy(1), None], use_tqdm=False)  # type: ignore[list-item]
    assert len(default.outputs[0].token_ids) <= 16
    assert not llm.engine.requests


def test_a_file_does_not_cut_or_pad_prompts(theirs: Any, tmp_path: Path) -> None:
    """Truncation and padding that a training script left in tokenizer.json are ignored."""
    write_tokenizer(tmp_path)
    kept = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    kept.enable_truncation(5)
    kept.enable_padding(length=8)
    kept.save(str(tmp_path / "tokenizer.json"))
    for text in ("abcabcabc", "abc"):
        assert Tokenizer(tmp_path).encode(text) == ids_of(text)


def test_a_prompt_that_cannot_be_served_has_an_error(llm: LLM) -> None:
    """Prompts that are too long, empty or invalid have an error; the others have their text."""
    prompts: list[Any] = [
        "fine",
        {"prompt_token_ids": []},
        "x" * 128,
        {"prompt_token_ids": [500]},
        {"prompt_token_ids": "abc"},
        {},
    ]
    outputs = llm.generate(prompts, greedy(3), use_tqdm=False)
    messages = [
        "the prompt has no tokens",
        "128 tokens, and with one more a sequence has at most 128",
        "token 500 is outside of the vocabulary of 130",
        "should be text, a list",
        "should be text, a list",
    ]
    assert len(outputs[0].outputs[0].token_ids) == 3
    for output, message in zip(outputs[1:], messages, strict=True):
        assert message in str(output.error)
        assert output.finished
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        next(llm.stream({"prompt_token_ids": []}))


def test_a_call_whose_every_prompt_is_refused_raises(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The error has the first reasons. Otherwise outputs have them, and a warning is logged."""
    empty: Any = {"prompt_token_ids": []}
    with pytest.raises(ValueError, match=r"^the prompt has no tokens$"):
        llm.generate(empty, use_tqdm=False)
    with pytest.raises(
        ValueError, match=r"all 4 prompts are refused: prompt 0: the pro.*; \.\.\.$"
    ):
        llm.generate([empty] * 4, use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []
    assert not caplog.records
    outputs = llm.generate(["fine", empty], greedy(1), use_tqdm=False)
    assert [output.error for output in outputs] == [None, "the prompt has no tokens"]
    bad = [{"role": "user", "content": None}]
    source = "{% if not messages[0].content %}{{ raise_exception('say more') }}{% endif %}ok"
    good = [{"role": "user", "content": "x"}]
    outputs = llm.chat([good, bad], greedy(1), False, chat_template=source)
    assert [output.error for output in outputs] == [
        None,
        "the chat template refuses the messages: say more",
    ]
    with pytest.raises(ValueError, match="refuses the messages: say more"):
        llm.chat(bad, greedy(1), False, chat_template=source)
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("vllm_module.runtime.text.prompts", "WARNING")
    ] * 2
    assert "1 of 2 prompts are refused: prompt 1: the prompt has no tokens" in caplog.text


def test_nan_in_the_logits_is_named(folder: Path) -> None:
    """It is the error of its own request, greedy or drawn."""
    with LLM(folder, **SMALL) as llm:
        execute = llm.engine.execute

        def broken(inputs: Any) -> Any:
            logits = execute(inputs).clone()
            if len(logits) == 2:  # the first step, and not those of the other prompt alone
                logits[0, 77] = torch.nan
            return logits

        llm.engine.execute = broken
        for params in (greedy(3), SamplingParams(temperature=1.0, top_p=0.9)):
            outputs = llm.generate(["cat", "dog"], params, use_tqdm=False)
            assert "its logits contain NaN" in str(outputs[0].error)
            assert outputs[1].error is None

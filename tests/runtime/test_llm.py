"""``LLM``: prompts in, text out."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from vllm_module import LLM, SamplingParams, WeightLoadError
from vllm_module.errors import CheckpointFormatError, ModelNotReadyError, RankError
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.ranks import worker_weights as workers
from vllm_module.runtime.text.chat import ChatTemplate
from vllm_module.runtime.text.tokenizer import Tokenizer

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


@pytest.fixture(scope="session")
def theirs() -> Any:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=130,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=128,
        eos_token_id=129,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name else 0.5 if "embed" in name or "head" in name else 0.15
        parameter.data.normal_(0, scale, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


SMALL = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, **SMALL) as llm:
        yield llm


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


def test_text_is_that_of_transformers(llm: LLM, theirs: Any) -> None:
    """Outputs have text, token ids and a finish reason, in the order of the prompts."""
    prompts = ["once upon", "a", "the quick brown fox, the lazy dog"]
    outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert output.prompt_token_ids == ids_of(prompt)
        assert completion.token_ids == generated(theirs, ids_of(prompt), 20)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason in ("length", "stop")
        assert output.finished
        assert output.error is None
        assert completion.logprobs is None


def test_one_prompt_token_ids_and_parameters_for_each(llm: LLM, theirs: Any) -> None:
    """A prompt may be given alone or as token ids, and each prompt may have its own parameters."""
    alone = llm.generate("fox", greedy(5), use_tqdm=False)
    assert len(alone) == 1
    ids = {"prompt_token_ids": ids_of("fox")}
    by_ids = llm.generate([ids, ids], [greedy(5), greedy(7)], use_tqdm=False)
    assert by_ids[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert len(by_ids[1].outputs[0].token_ids) == 7
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [greedy(1)], use_tqdm=False)


def test_a_seed_gives_the_same_tokens_in_any_batch(llm: LLM) -> None:
    """With a seed, samples are the same alone and in a batch; samples of one prompt differ."""
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=12, n=3)
    (alone,) = llm.generate("dog", params, use_tqdm=False)
    together = llm.generate(["cat", "dog", "x" * 30], [greedy(9), params, greedy(3)], False)
    tokens = [completion.token_ids for completion in alone.outputs]
    assert [completion.token_ids for completion in together[1].outputs] == tokens
    assert len(set(map(tuple, tokens))) == 3
    unseeded = SamplingParams(temperature=1.5, max_tokens=12)
    twice = [llm.generate("dog", unseeded, False)[0].outputs[0].token_ids for _ in range(2)]
    assert twice[0] != twice[1]


def test_logprobs_are_the_models(llm: LLM, theirs: Any) -> None:
    """Logprobs of output and prompt are those of transformers' logits, with each token's text."""
    (output,) = llm.generate("the fox", greedy(4, logprobs=2, prompt_logprobs=0), False)
    (completion,) = output.outputs
    ids = output.prompt_token_ids + completion.token_ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    total = 0.0
    for index, (token, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs or [], strict=True)
    ):
        position = len(output.prompt_token_ids) + index - 1
        assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        assert entry[token].rank == 1
        assert len(entry) == 2
        assert entry[token].decoded_token == llm.tokenizer.decode([token], False)
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        token = output.prompt_token_ids[position + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_output_ends_at_stop_strings_and_stop_tokens(llm: LLM) -> None:
    """``stop_reason`` is the stop string, at which the text is cut, or the stop token's id."""
    (plain,) = llm.generate("once", greedy(30, ignore_eos=True), False)
    text = plain.outputs[0].text
    stop = text[7:10]
    (cut,) = llm.generate("once", greedy(30, ignore_eos=True, stop=["never!", stop]), False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    kept = greedy(30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("once", kept, False)[0].outputs[0].text.endswith(stop)
    token = plain.outputs[0].token_ids[4]
    (by_token,) = llm.generate("once", greedy(30, ignore_eos=True, stop_token_ids=[token]), False)
    first = plain.outputs[0].token_ids.index(token)
    assert by_token.outputs[0].token_ids == plain.outputs[0].token_ids[: first + 1]
    assert by_token.outputs[0].stop_reason == token
    assert by_token.outputs[0].text == llm.tokenizer.decode(plain.outputs[0].token_ids[:first])
    shown = greedy(30, ignore_eos=True, stop_token_ids=[token], include_stop_str_in_output=True)
    assert llm.generate("once", shown, False)[0].outputs[0].text == llm.tokenizer.decode(
        plain.outputs[0].token_ids[: first + 1]
    )
    later = greedy(30, ignore_eos=True, stop_token_ids=[token], min_tokens=first + 3)
    assert len(llm.generate("once", later, False)[0].outputs[0].token_ids) >= first + 3


def test_a_stream_grows_token_by_token(llm: LLM) -> None:
    """Streams taken in turns yield growing text, and end with the text of ``generate``."""
    expected = {p: llm.generate(p, greedy(10), False)[0].outputs[0] for p in ("cat", "dog")}
    streams = {prompt: llm.stream(prompt, greedy(10)) for prompt in expected}
    texts: dict[str, list[str]] = {prompt: [] for prompt in expected}
    while streams:
        for prompt in list(streams):
            output = next(streams[prompt], None)
            if output is None:
                del streams[prompt]
            else:
                texts[prompt].append(output.outputs[0].text)
    for prompt, pieces in texts.items():
        assert pieces[-1] == expected[prompt].text
        assert len(pieces) > 3
        assert all(late.startswith(early) for early, late in pairwise(pieces))


def test_a_stream_yields_no_output_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output has more tokens than the last, wherever another thread's step comes between."""
    take = llm._output

    def step() -> None:
        if llm.engine.lock.acquire(blocking=False):
            try:
                llm.engine.step()
            finally:
                llm.engine.lock.release()

    def output(request: Any) -> RequestOutput:
        """Have another thread add a token now, if it can."""
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return take(request)

    monkeypatch.setattr(llm, "_output", output)
    outputs = list(llm.stream("fox", greedy(9, ignore_eos=True)))
    lengths = [len(each.outputs[0].token_ids) for each in outputs]
    assert lengths == sorted(set(lengths))
    assert [each.finished for each in outputs] == [length == 9 for length in lengths]


def test_a_stream_shows_no_part_of_a_stop_string(llm: LLM) -> None:
    """Text that may be the beginning of a stop string is held back."""
    text = llm.generate("once", greedy(30, ignore_eos=True), False)[0].outputs[0].text
    params = greedy(30, ignore_eos=True, stop=["never!", text[7:10]])
    pieces = [output.outputs[0].text for output in llm.stream("once", params)]
    assert pieces[-1] == text[: text.index(text[7:10])]
    assert all(pieces[-1].startswith(piece) for piece in pieces)


def test_steps_that_overlap_give_the_same_text(folder: Path, theirs: Any, llm: LLM) -> None:
    """Stop strings, streams, updates between two steps, and sleep are as without."""
    assert not llm.engine.async_scheduling  # on a CPU, nothing would overlap
    text = llm.generate("once", greedy(30, ignore_eos=True), False)[0].outputs[0].text
    params = [
        greedy(30, ignore_eos=True, stop=["never!", text[7:10]]),
        SamplingParams(seed=3, max_tokens=1),
        SamplingParams(seed=4, n=2, max_tokens=20, prompt_logprobs=0),
        greedy(25, repetition_penalty=1.3),
    ]
    head = theirs.lm_head.weight.detach()

    def changing(engine: LLM) -> list[list[int]]:
        """Return a stream's tokens, step by step, while the weights change."""
        stream = engine.stream("fox", greedy(8, ignore_eos=True))
        pieces = [next(stream), next(stream)]
        engine.update_weights({"lm_head.weight": head.flip(0).contiguous()})
        try:
            pieces += stream
        finally:
            engine.update_weights({"lm_head.weight": head})
        return [piece.outputs[0].token_ids for piece in pieces]

    def unversioned(outputs: list[Any]) -> list[Any]:
        """Return outputs without the versions of the weights: updates count them up."""
        return [replace(each, weight_versions=[]) for each in outputs]

    with LLM(folder, **SMALL, async_scheduling=True) as overlapped:
        given: list[list[Any]] = []
        for engine in (llm, overlapped):
            outputs = engine.generate(["once", "upon", "a", "time"], params, False)
            given.append([(unversioned(o.outputs), o.prompt_logprobs) for o in outputs])
            pieces = [o.outputs[0].text for o in engine.stream("once", params[0])]
            given[-1] += [pieces, changing(engine)]
        assert given[0] == given[1]
        assert not overlapped.engine._launched
        overlapped.sleep()
        overlapped.wake_up()
        (again,) = overlapped.generate("once", params[0], False)
        assert unversioned(again.outputs) == given[0][0][0]


def test_the_whole_context_can_be_used(llm: LLM) -> None:
    """A sequence ends at the last position of the context."""
    (output,) = llm.generate("x" * 120, greedy(50, ignore_eos=True), False)
    (completion,) = output.outputs
    assert (len(completion.token_ids), completion.finish_reason) == (8, "length")


def test_a_closed_stream_is_aborted(llm: LLM) -> None:
    """Closing a stream frees its pages."""
    stream = llm.stream("once upon", greedy(50))
    next(stream)
    assert llm.engine.requests
    stream.close()
    assert not llm.engine.requests
    pool = llm.engine.scheduler.pool
    assert pool.free_pages == pool.num_pages


def test_chat_renders_messages_by_the_checkpoints_template(llm: LLM) -> None:
    """The prompt is the template's text, and its special tokens are encoded once."""
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.chat_prompt(messages)
    assert prompt["prompt"] == "<s><user>hi<assistant>"
    assert prompt["prompt_token_ids"] == [128, *ids_of("<user>hi<assistant>")]
    (output,) = llm.chat(messages, greedy(5), use_tqdm=False)
    (same,) = llm.generate([prompt], greedy(5), use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert len(llm.chat([messages, messages], greedy(2), use_tqdm=False)) == 2
    assert llm.get_tokenizer() is llm.tokenizer
    for wrong in ([], ["hi"], [{"content": "hi"}]):
        with pytest.raises(ValueError, match="messages should be a list of mappings with a role"):
            llm.chat_prompt(wrong)


def test_chat_by_another_template_and_its_variables(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A template may be given; the log has variables that it does not read, once."""
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    source = "{{ messages[0].content + (mood or '') }}{% if tools %}<tools>{% endif %}"
    assert llm.chat_prompt(messages, source, mood="!")["prompt"] == "a\nb!"
    options: dict[str, Any] = {"chat_template": source, "chat_template_kwargs": {"mood": "?"}}
    (output,) = llm.chat(messages, greedy(1), False, **options, tools=[{"name": "any"}])
    assert output.prompt == "a\nb?<tools>"
    (plain,) = llm.chat(messages, greedy(1), False, add_generation_prompt=False)
    assert plain.prompt == "<s><user>a\nb"
    with caplog.at_level(logging.WARNING, "vllm_module"):
        for _ in range(2):
            given: dict[str, Any] = {"chat_template_kwargs": {"mood": "?"}, "tools": []}
            (unread,) = llm.chat(messages, greedy(1), False, **given)
            assert unread.prompt == "<s><user>a\nb<assistant>"
    (record,) = [each for each in caplog.records if "does not read" in each.message]
    assert "does not read mood, tools: it reads add_generation_prompt, bos" in record.message
    with caplog.at_level(logging.WARNING, "vllm_module"):
        for _ in range(2):
            llm.chat(messages, greedy(1), False, **options | {"chat_template_kwargs": {"age": 3}})
    assert sum("does not read age" in each.message for each in caplog.records) == 1
    for parts in ([{"type": "image_url", "image_url": "x"}], [3]):
        with pytest.raises(ValueError, match="a part of a message's content should be text, got"):
            llm.chat([{"role": "user", "content": parts}])
    (empty,) = llm.chat([{"role": "user", "content": None}], greedy(1), False, **options)
    assert empty.prompt == "?"
    with pytest.raises(ValueError, match=r"cannot format the messages: TypeError: "):
        llm.chat([{"role": "user", "content": 3}], chat_template=source)
    assert llm.chat([]) == []
    for wrong in (None, "hi", 5):
        with pytest.raises(ValueError, match="messages should be"):
            llm.chat(wrong)  # type: ignore[arg-type]
    for wrong_format in ("text", None, 3):
        with pytest.raises(ValueError, match="chat_template_content_format should be 'auto'"):
            llm.chat(messages, chat_template_content_format=wrong_format)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got multiple values"):
        llm.chat(messages, chat_template_kwargs={"messages": []})
    both = llm.chat(iter([messages[0], {"role": "assistant", "content": "c"}]), greedy(1), False)  # type: ignore[arg-type]
    assert both[0].prompt == "<s><user>a\nb<assistant>c<assistant>"


STRING = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PARTS = "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]"
    "{% else %}{% for c in m['content'] %}<{{ c['text'] }}>{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
EMPTY = {"type": "text", "text": ""}
OTHERS = [
    {"type": "input_text", "text": "a"},
    {"type": "output_text", "text": "b"},
    {"type": "refusal", "refusal": "c"},
    {"type": "thinking", "thinking": "d"},
]


@pytest.mark.parametrize(
    ("template", "content", "given", "text"),
    [
        (STRING, "a", "auto", "<a>"),
        (STRING, TEXTS, "auto", "<a\nb>"),
        (STRING, None, "auto", "<>"),
        (PARTS, "a", "auto", "<a>"),  # as transformers with parts, and vLLM
        (PARTS, TEXTS, "auto", "<a><b>"),
        (PARTS, ["a", "b"], "auto", "<a><b>"),
        (PARTS, None, "auto", ""),
        (PARTS, "ab", "string", "<><>"),
        (EITHER, "a", "auto", "[a]"),
        (EITHER, TEXTS, "auto", "<a><b>"),
        (EITHER, "a", "openai", "<a>"),
        (EITHER, TEXTS, "string", "[a\nb]"),
        (PARTS, [*TEXTS, {"type": "text", "text": None}], "auto", "<a><b>"),
        (PARTS, tuple(TEXTS), "auto", "<a><b>"),
        (PARTS, [EMPTY, *TEXTS, EMPTY], "auto", "<><a><b><>"),
        (STRING, [EMPTY, TEXTS[0], EMPTY, TEXTS[1]], "auto", "<a\nb>"),  # as vLLM joins them
        (STRING, [EMPTY], "auto", "<>"),
        (STRING, [], "auto", "<>"),
        (PARTS, [], "auto", ""),
        (STRING, OTHERS, "auto", "<a\nb\nc\nd>"),
        (PARTS.replace("c.text", "c.text[:1]"), "ab", "auto", "<a>"),
        (PARTS.replace("c.text", "c.text|upper"), "a", "auto", "<A>"),
        (STRING.replace("m.content", "m.content|upper"), TEXTS, "auto", "<A\nB>"),
        ("{% if messages|length < 2 %}{{ raise_exception('two') }}{% endif %}", "a", "auto", ""),
    ],
)
def test_a_template_gets_the_content_that_it_shows(
    tmp_path: Path, template: str, content: Any, given: Any, text: str
) -> None:
    """Text or a list of parts, whichever the messages have; what is asked for goes before."""
    messages = [{"role": "user", "content": content}]
    if "length" in template:
        messages *= 2
    rendered = ChatTemplate(tmp_path, template).render(messages, content_format=given)
    assert rendered == text


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_a_template_that_begins_with_the_system_gets_the_content_that_it_shows(
    tmp_path: Path, refusal: str
) -> None:
    """It shows nothing of a user's message alone, and is tried with another before."""
    check = f"{{% if messages[0].role != 'system' %}}{refusal}{{% endif %}}"
    template = ChatTemplate(tmp_path, check + PARTS.replace("in messages", "in messages[1:]"))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert template.render(messages) == "<a>"


@pytest.mark.parametrize("source", [STRING, STRING.replace("m.content", "m.content|trim"), PARTS])
def test_a_message_is_continued_as_by_transformers(
    folder: Path, tmp_path: Path, source: str
) -> None:
    """The prompt ends with the message's text, as the template shows it; an empty one too."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    template = ChatTemplate(tmp_path, source)
    for text in ("b", "", " ", "  b \n ", "a"):
        messages: list[Any] = [{"role": r, "content": c} for r, c in (("user", "a"), ("ai", text))]
        if source is PARTS:
            for each in messages:
                each["content"] = [{"type": "text", "text": each["content"]}]
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, continue_final_message=True
        )
        assert template.render(messages, False, continue_final_message=True) == expected, text
    with pytest.raises(ValueError, match="whose text the chat template shows"):
        ChatTemplate(tmp_path, "x").render(messages, False, continue_final_message=True)


def test_messages_of_tools_are_rendered_as_elsewhere(tmp_path: Path) -> None:
    """A message without content is empty, and arguments that are JSON text are read before."""
    calls = "{% for c in m.tool_calls %}{{ c.function.arguments.city }};{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    template = ChatTemplate(tmp_path, source)

    def message(arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        return {"role": "assistant", "tool_calls": calls}

    given = [
        message('{"city": "Rome"}'),
        message({"city": "Bern"}),
        message(""),
        message("no JSON"),
        message(None),
        {"role": "assistant", "tool_calls": (*message('{"city": "Oslo"}')["tool_calls"],)},
    ]
    assert template.render(given) == "Rome;Bern;;;;Oslo;"
    (first,) = given[0]["tool_calls"]
    del first["function"]["name"]
    assert template.render([message({}), {"role": "assistant", "tool_calls": [first]}]) == ";Rome;"
    assert given[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'  # unchanged


def test_a_template_for_training_is_rendered(tmp_path: Path) -> None:
    """``{% generation %}`` marks the assistant's text for trainers, and shows it."""
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "assistant", "content": "a"}]
    assert ChatTemplate(tmp_path, source).render(messages) == "a"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"chat_template": [1]}, "has no chat template"),
        ({"chat_template": [{"name": "other", "template": "x"}]}, "templates 'other', and none"),
        ({"chat_template": 5}, "has no chat template"),
    ],
)
def test_an_entry_that_is_no_template_is_refused(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointFormatError, match=message):
        ChatTemplate(tmp_path)


def test_special_tokens_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    entries = {"bos_token": {"a": 1}, "chat_template": "{{ bos_token or 'none' }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    assert ChatTemplate(tmp_path).render([{"role": "user"}]) == "none"


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


def test_ctrl_c_ends_running_requests_only(llm: LLM, theirs: Any) -> None:
    """The interrupted call raises KeyboardInterrupt, and the next call is served."""
    execute = llm.engine.execute

    def interrupted(inputs: Any) -> Any:
        raise KeyboardInterrupt

    stream = llm.stream("dog", greedy(20, ignore_eos=True))
    next(stream)
    llm.engine.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(5), use_tqdm=False)
    llm.engine.execute = execute
    assert "failed: KeyboardInterrupt" in str(list(stream)[-1].error)
    (output,) = llm.generate("once upon", greedy(9), use_tqdm=False)
    assert output.outputs[0].token_ids == generated(theirs, ids_of("once upon"), 9)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_between_two_prompts_leaves_none(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts before it are aborted, though no step has begun."""
    add, added = llm.engine.add, []

    def interrupted(*given: Any, **named: Any) -> Any:
        if added:
            raise error
        added.append(add(*given, **named))
        return added[-1]

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(error):
        llm.generate(["a", "b"], greedy(5), use_tqdm=False)
    assert not llm.engine.requests
    assert added[0].sequences[0].finish_reason == "abort"


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


def test_a_tiny_cache_changes_no_token(folder: Path, theirs: Any) -> None:
    """With pages for hardly more than one sequence, all tokens are those of a large cache."""
    prompts = [{"prompt_token_ids": [i, 3, i + 5] * (1 + 3 * i)} for i in range(6)]
    small = {"block_size": 4, "max_num_batched_tokens": 8, "max_model_len": 80}
    page = 2 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, features, tokens, bytes
    for swap_space in (0.0, 0.001):
        engine = small | {"kv_cache_memory_bytes": 22 * page, "swap_space": swap_space}
        with LLM(folder, **engine) as tiny:
            outputs = tiny.generate(prompts, greedy(25, ignore_eos=True), use_tqdm=False)
            assert tiny.engine.scheduler.preemptions > 0
            pool = tiny.engine.scheduler.pool
            assert pool.free_pages == pool.num_pages == 22
        for prompt, output in zip(prompts, outputs, strict=True):
            longest = 22 * 4 - len(prompt["prompt_token_ids"])
            tokens = output.outputs[0].token_ids
            assert len(tokens) == min(25, longest)
            expected = generated(theirs, prompt["prompt_token_ids"], len(tokens))
            assert tokens[: len(expected)] == expected


def test_weights_take_effect_between_steps(folder: Path, theirs: Any) -> None:
    """An update changes the next tokens, and pages cached before it are not reused."""
    with LLM(folder, **SMALL) as llm:
        long = {"prompt_token_ids": [5, 6] * 20}
        before = llm.generate(long, greedy(8), False)[0].outputs[0].token_ids
        head = theirs.lm_head.weight.detach().flip(0).contiguous()
        stream = llm.stream("fox", greedy(8, ignore_eos=True))
        next(stream)
        llm.update_weights({"lm_head.weight": head})
        assert len(list(stream)) == 7  # running requests continue
        after = llm.generate(long, greedy(8), False)[0].outputs[0].token_ids
        assert after[0] == 129 - before[0]
        llm.update_weights({"lm_head.weight": theirs.lm_head.weight.detach()})
        assert llm.generate(long, greedy(8), False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_that_is_refused_costs_nothing(folder: Path, theirs: Any, size: int) -> None:
    """Requests go on with the weights that they had, and so does a later update of a part."""
    head = theirs.lm_head.weight.detach()
    nan = head.clone()
    nan[3, 2] = torch.nan

    def stream_of_one() -> Any:
        yield "model.norm.bias", head

    with LLM(folder, tensor_parallel_size=size, **SMALL) as llm:
        before = llm.generate("fox", greedy(8, ignore_eos=True), False)[0].outputs[0].token_ids
        stream = llm.stream("fox", greedy(8, ignore_eos=True))
        next(stream)
        for refused, why in (
            ({"lm_head.weight": torch.zeros(3, 3)}, "expected shape"),
            ({"lm_head.weight": head, "lm_heads.weight": head}, "lm_heads"),
            (stream_of_one(), "model.norm.bias"),
            ({"lm_head.weight": nan}, "lm_head.weight has a NaN"),
        ):
            with pytest.raises(WeightLoadError, match=why):
                llm.update_weights(refused)
        assert list(stream)[-1].outputs[0].token_ids == before
        llm.update_weights({"lm_head.weight": head.flip(0).contiguous()})  # a part is enough
        after = llm.generate("fox", greedy(8), False)[0].outputs[0].token_ids
        assert after[0] == 129 - before[0]


def test_a_failed_update_ends_and_refuses_requests(folder: Path, theirs: Any) -> None:
    """Running requests end and new ones are refused, with the reason, until it is repaired."""

    def breaking() -> Any:
        yield "lm_head.weight", theirs.lm_head.weight.detach()
        yield "lm_head.weight", torch.zeros(3, 3)

    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        stream = llm.stream("dog", greedy(8))
        next(stream)
        with pytest.raises(WeightLoadError):
            llm.update_weights(breaking())
        last = list(stream)[-1]
        assert last.finished
        assert "an update of the weights failed" in str(last.error)
        for refused in (lambda: llm.generate("fox"), lambda: next(llm.stream("fox"))):
            with pytest.raises(ModelNotReadyError, match="requests: an update of the weights fail"):
                refused()
        with pytest.raises(ModelNotReadyError, match=r"whole checkpoint, or reload_weights\(\)"):
            llm.wake_up()
        with pytest.raises(ModelNotReadyError, match=r"sleep\(level=2\) drops"):
            llm.sleep()
        llm.reload_weights()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


def test_an_interrupted_update_is_repaired_by_reloading_or_a_whole_update(
    folder: Path, theirs: Any
) -> None:
    """The model has some new weights, and refuses to run before all are of one checkpoint."""
    state = theirs.state_dict()

    def breaking() -> Any:
        yield "model.norm.weight", state["model.norm.weight"] * 3
        raise OSError("disk gone")

    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        repairs = (llm.reload_weights, lambda: llm.update_weights(state), llm.reload_weights)
        for repair in repairs:
            with pytest.raises(OSError, match="disk gone"):
                llm.update_weights(breaking())
            with pytest.raises(ModelNotReadyError, match="disk gone"):
                llm.generate("fox", greedy(5), False)
            repair()
            assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before
        model = llm.executor.worker.model
        load_weights = model.load_weights
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "load_weights", lambda weights: load_weights(breaking()))
            with pytest.raises(OSError, match="disk gone"):
                llm.reload_weights()
        with pytest.raises(ModelNotReadyError, match="reloading the weights failed: OSError: disk"):
            llm.generate("fox", greedy(5), False)
        llm.update_weights(state)
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before
        llm.update_weights({"model.norm.weight": state["model.norm.weight"].flip(0)})
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids != before
        llm.reload_weights()  # the checkpoint as it is on disk, though nothing slept
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


def test_nothing_is_updated_while_it_sleeps(folder: Path, theirs: Any) -> None:
    """A sleeping engine refuses an update, stays asleep, and can wake up."""
    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        llm.sleep()
        with pytest.raises(RuntimeError, match=r"the engine sleeps.*wake_up\(\) first"):
            llm.update_weights(theirs.state_dict())
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            llm.generate("fox", greedy(5), False)
        llm.wake_up()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_closed_engine_has_no_cache(folder: Path, overlapped: bool) -> None:
    """Closing releases the memory, even while the ``LLM`` object exists, and gives no token."""
    with LLM(folder, **SMALL, async_scheduling=overlapped) as llm:
        stream = llm.stream("dog", greedy(8, ignore_eos=True))
        next(stream)
    llm.close()
    assert llm.executor.worker.cache.nbytes == 0
    assert not llm.engine._launched
    for late in (lambda: next(stream), lambda: llm.generate("fox", use_tqdm=False)):
        with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
            late()
    calls = lambda: llm.update_weights({}), llm.wake_up, llm.sleep, llm.reload_weights
    for late in calls:
        with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
            late()


@pytest.mark.parametrize("overlapped", [False, True])
def test_closing_waits_for_a_step_of_another_thread(folder: Path, overlapped: bool) -> None:
    """The other thread's call raises that the engine was closed, and no other error."""
    raised: list[BaseException] = []
    with LLM(folder, **SMALL, async_scheduling=overlapped) as llm:
        begun = threading.Event()
        execute = llm.engine.execute

        def slow(*inputs: Any) -> Any:
            begun.set()
            time.sleep(0.05)
            return execute(*inputs)

        llm.engine.execute = slow

        def serve() -> None:
            try:
                llm.generate("dog", greedy(100, ignore_eos=True), use_tqdm=False)
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        begun.wait()
    thread.join()
    assert [str(error) for error in raised] == ["the engine has ended: it was closed"]


def test_sleep_and_wake_up(folder: Path) -> None:
    """A sleeping engine has no weights and refuses requests; awake, it is as before."""
    with LLM(folder, **SMALL) as llm:
        before = llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids
        stream = llm.stream("dog", greedy(8))
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests are going on"):
            llm.sleep()
        stream.close()
        for level in (0, 3, True, "1"):
            with pytest.raises(ValueError, match="level should be 1 or 2"):
                llm.sleep(level)
        llm.sleep(level=2)
        with pytest.raises(RuntimeError, match="sleeps already"):
            llm.sleep()
        model = llm.executor.worker.model
        assert all(parameter.is_meta for parameter in model.parameters())
        with pytest.raises(ModelNotReadyError):
            model(torch.tensor([1]), torch.tensor([0]))
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            llm.generate("fox", greedy(5), False)
        llm.wake_up()
        assert llm.generate("fox", greedy(5), False)[0].outputs[0].token_ids == before


def first_tokens(llm: LLM) -> list[int]:
    return llm.generate("fox", greedy(8, ignore_eos=True), False)[0].outputs[0].token_ids


@pytest.mark.parametrize("size", [1, 2])
def test_it_wakes_up_with_the_weights_that_slept(folder: Path, theirs: Any, size: int) -> None:
    """Updates are kept at level 1; at level 2 they must be sent, or the loss must be asked for."""
    state = theirs.state_dict()
    new = state | {"lm_head.weight": state["lm_head.weight"].flip(0).contiguous()}
    with LLM(folder, tensor_parallel_size=size, **SMALL) as llm:
        first = first_tokens(llm)
        llm.sleep(level=2)
        llm.wake_up()  # nothing was updated, so the folder has them
        assert first_tokens(llm) == first
        llm.update_weights({"lm_head.weight": new["lm_head.weight"]})
        updated = first_tokens(llm)
        assert updated[0] == 129 - first[0]
        llm.sleep()
        llm.wake_up()
        llm.wake_up()  # it is awake
        assert first_tokens(llm) == updated
        llm.sleep(level=2)
        with pytest.raises(ModelNotReadyError, match=r"update_weights .*or reload_weights\(\)"):
            llm.wake_up()
        with pytest.raises(WeightLoadError, match="missing"):  # a part is not enough
            llm.update_weights({"lm_head.weight": new["lm_head.weight"]})
        with pytest.raises(ModelNotReadyError):
            first_tokens(llm)
        llm.update_weights(new)
        assert first_tokens(llm) == updated
        llm.sleep(level=2)
        llm.reload_weights()
        assert first_tokens(llm) == first


def test_a_folder_that_changed_does_not_wake_it_up(folder: Path, tmp_path: Path) -> None:
    """What slept at level 2 is not replaced by what was saved to the folder since."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    with LLM(copy, **SMALL) as llm:
        tensors = load_file(copy / "model.safetensors")
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
        save_file(tensors, copy / "new", {"format": "pt"})
        (copy / "new").replace(copy / "model.safetensors")
        first = first_tokens(llm)
        llm.sleep(level=2)
        with pytest.raises(ModelNotReadyError, match="have changed since"):
            llm.wake_up()
        llm.reload_weights()
        assert first_tokens(llm)[0] == 129 - first[0]


def test_token_ids_need_no_tokenizer(theirs: Any, tmp_path: Path) -> None:
    """A checkpoint without a tokenizer serves token ids; the error of text names the file."""
    theirs.save_pretrained(tmp_path)
    with LLM(tmp_path, **SMALL) as llm:
        ids = {"prompt_token_ids": [1, 2, 3]}
        outputs = llm.generate([ids, "text"], greedy(4), use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == generated(theirs, [1, 2, 3], 4)
        assert outputs[0].outputs[0].text == ""
        assert "has no tokenizer.json" in str(outputs[1].error)
        with pytest.raises(CheckpointFormatError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_processed_logprobs_follow_from_raw_ones(folder: Path) -> None:
    """At temperature 0.5, with a ban, they are the softmax of twice the raw ones without it."""
    params = SamplingParams(
        temperature=0.5, seed=3, max_tokens=3, logprobs=-1, ignore_eos=True,
        logit_bias={7: -100.0},
    )  # fmt: skip
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with LLM(
            str(folder), device="cpu", skip_tokenizer_init=True, max_logprobs=-1, logprobs_mode=mode
        ) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        found[mode] = output.outputs[0]
    raw, processed = found.values()
    assert raw.token_ids == processed.token_ids
    for one, other in zip(raw.logprobs or [], processed.logprobs or [], strict=True):
        values = torch.tensor([one[token].logprob for token in range(len(one))])
        values[7] -= 100
        expected = (values / 0.5).log_softmax(-1)
        got = torch.tensor([other[token].logprob for token in range(len(one))])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="logprobs_mode"):
        LLM(str(folder), device="cpu", logprobs_mode="raw_logits")


def test_an_fp8_cache_gives_nearly_the_same_logprobs(folder: Path, llm: LLM) -> None:
    """With keys and values in eight bits, logprobs change a little."""
    params = greedy(1, logprobs=0)
    exact = llm.generate("the quick brown fox", params, False)[0].outputs[0]
    for dtype, within in (("fp8", 0.5), ("fp8_e5m2", 1.0)):
        with LLM(folder, **SMALL, kv_cache_dtype=dtype) as narrow:
            (output,) = narrow.generate("the quick brown fox", params, False)
            moved = output.outputs[0].cumulative_logprob - exact.cumulative_logprob
            assert 0 < abs(moved) < within


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"async_scheduling": "yes"}, "async_scheduling"),
        ({"no_such_option": 1}, "LLM has no argument 'no_such_option'$"),
        ({"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'"),
        ({"quantisation": "fp8"}, "did you mean 'quantization'"),
        ({"data_parallel_size": 2}, r"size=2\) of vLLM is not supported here: .*, or give 1$"),
        ({"load_format": "h5"}, "load_format should be 'auto', 'sharded_state', 'safetensors'"),
        ({"speculative_config": {}}, "is not supported here: leave it out$"),
        ({"generation_config": "folder"}, "generation_config should be 'auto'"),
        ({"tokenizer": "./no/such/folder"}, "no/such/folder does not exist"),
        ({"kv_cache_memory_bytes": 10}, "no memory for a page of 16 tokens, which takes 8192"),
    ],
)
def test_invalid_settings_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=message):
        LLM(folder, **options)


def test_compiled_steps_give_the_same_tokens(folder: Path, theirs: Any, llm: LLM) -> None:
    """A compiled model gives the same tokens in steps of any size, with new weights too.

    Attention to the cache is not compiled, because inductor writes to views of one cache wrongly.
    """
    operations: set[str] = set()
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    prompts = ["once upon a time, there was", "the", "quick brown"]
    params = greedy(12, ignore_eos=True)
    norm = "model.norm.weight"
    weight = theirs.state_dict()[norm]

    def tokens(engine: LLM) -> list[list[int]]:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(llm)
    llm.update_weights({norm: weight.flip(0)})
    try:
        changed = tokens(llm)
    finally:
        llm.update_weights({norm: weight})
    assert changed != expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        compiled = LLM(folder, **SMALL, max_num_batched_tokens=16, enable_torch_compile=True)
    with compiled:
        assert tokens(compiled) == expected
        assert tokens(compiled) == expected
        compiled.update_weights({norm: weight.flip(0)})
        assert tokens(compiled) == changed
    compiled_kernels = {name for name in operations if name.startswith("vllm_module.")}
    assert "vllm_module.rotary_embedding.default" in compiled_kernels
    assert not any("attention" in name or "cache" in name for name in compiled_kernels)


def test_min_tokens_delay_every_end(llm: LLM) -> None:
    """Before ``min_tokens``, no stop token is chosen and no stop string ends the output."""

    def tokens(token: int, **params: Any) -> list[int]:
        wanted = greedy(6, logit_bias={token: 100.0}, **params)
        return llm.generate("once", wanted, False)[0].outputs[0].token_ids

    assert tokens(129) == [129]
    assert tokens(129, ignore_eos=True) == [129] * 6
    for delayed in (tokens(129, min_tokens=3), tokens(5, min_tokens=3, stop_token_ids=[5])):
        assert len(delayed) == 4
        assert not {5, 129} & set(delayed[:3])
    assert tokens(5, stop="f") == [5]
    assert tokens(5, stop="f", min_tokens=3) == [5] * 3
    assert tokens(40, stop="#40") == [40]  # three letters at once
    special = {"ignore_eos": True, "stop": "</s>"}
    assert tokens(129, **special, skip_special_tokens=False) == [129]
    assert tokens(129, **special) == [129] * 6


def test_zero_is_a_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=0, max_tokens=12)
    twice = [llm.generate("dog", params, False)[0].outputs[0].token_ids for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_stream_needs_no_tokenizer(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    with LLM(tmp_path, **SMALL) as llm:
        *_, last = llm.stream({"prompt_token_ids": [1, 2, 3]}, greedy(4))
        assert last.outputs[0].token_ids == generated(theirs, [1, 2, 3], 4)


def test_arguments_of_vllm_that_change_nothing_are_accepted(theirs: Any, tmp_path: Path) -> None:
    """The tokenizer may be another folder's; a seed decides the draws of requests without one."""
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    write_tokenizer(tmp_path / "text")
    drawn = SamplingParams(temperature=2.0, max_tokens=9, detokenize=True, bad_words=None)
    texts = []
    for _ in range(2):
        with LLM(
            tmp_path / "model",
            tokenizer=tmp_path / "text",
            seed=5,
            dtype="float",
            max_logprobs=3,
            load_format="safetensors",
            distributed_executor_backend="mp",
            trust_remote_code=False,
            disable_log_stats=True,
            cpu_offload_gb=0,
            download_dir=str(tmp_path),
            hf_token=False,
            **SMALL,
        ) as llm:
            outputs = llm.generate(["cat", "cat"], drawn, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            assert llm.chat_prompt([{"role": "user", "content": "a"}])["prompt"].startswith("<s>")
            with pytest.raises(ValueError, match="4 logprobs are more than max_logprobs=3"):
                llm.generate("cat", greedy(1, logprobs=4), use_tqdm=False)
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    with LLM(tmp_path / "model", skip_tokenizer_init=True, **SMALL) as llm:
        assert llm.tokenizer is None
        assert llm.no_tokenizer == "skip_tokenizer_init is set"


def test_the_checkpoint_recommends_sampling_parameters(folder: Path, tmp_path: Path) -> None:
    """Requests without parameters use generation_config.json, unless it is not to be read."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    entries = {"do_sample": False, "temperature": 0.5, "top_k": 1, "top_p": None}
    path.write_text(json.dumps(entries | {"max_new_tokens": 3, "eos_token_id": 129}))
    with LLM(tmp_path / "model", **SMALL) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.5, top_k=1, max_tokens=3)
        assert params.model_fields_set == {"temperature", "top_k", "max_tokens"}
        (expected,) = llm.generate("fox", greedy(3), use_tqdm=False)
        outputs = llm.generate(["fox", "fox"], [None, params], use_tqdm=False)  # type: ignore[list-item]
        outputs += [list(llm.stream("fox"))[-1]]
        outputs += llm.chat(
            [{"role": "user", "content": "x"}], chat_template="{{ 'fox' }}", use_tqdm=False
        )
        for output in outputs:
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(
        CheckpointFormatError, match=r"generation_config\.json: temperature should .*'hot'"
    ):
        LLM(tmp_path / "model", **SMALL)
    with LLM(tmp_path / "model", **SMALL, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


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


def test_warnings_are_seen_where_logging_is_not_configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints them on standard error, unless a handler of ours is in between."""
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.getLogger("vllm_module.runtime.ranks.group").warning("waiting for rank 1")
    assert capsys.readouterr().err == "waiting for rank 1\n"


def test_loading_logs_three_lines(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The format; whose model it is; what was loaded, the time, the memory of weights and cache."""
    with caplog.at_level(logging.INFO, "vllm_module"), LLM(folder, **SMALL):
        pass
    found, whose, record = (record for record in caplog.records if record.levelname == "INFO")
    assert found.getMessage() == f"weights in {folder}: safetensors"
    assert whose.getMessage() == "model_impl of Qwen3ForCausalLM: native"
    assert re.fullmatch(
        rf"loaded in \d+\.\d s: model: {folder}; architecture: Qwen3ForCausalLM, float32; "
        r"layers: 2; device: cpu, ranks: 1; weights of a rank: 0\.3 MiB; cache of a rank: 128 "
        r"pages of 16 tokens, 2048 in all, 1\.0 MiB; sequences: at most 128 tokens",
        record.getMessage(),
    )


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


def test_a_template_that_cannot_be_compiled_is_refused_by_chat_alone(
    folder: Path, tmp_path: Path
) -> None:
    """The engine is made and generates; the reason is known before the first message."""
    shutil.copytree(folder, tmp_path / "model")
    write_tokenizer(tmp_path / "model", "{% if %}")
    with LLM(tmp_path / "model", **SMALL) as llm:
        assert "cannot be read: Expected an expression" in llm.no_chat_template
        assert llm.generate("fox", greedy(1), use_tqdm=False)[0].error is None
        with pytest.raises(CheckpointFormatError, match="cannot be read: Expected an expression"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_every_method_names_a_rank_that_has_ended(folder: Path, theirs: Any) -> None:
    """The error is the same whatever is called, also before a step; closing works."""
    with LLM(folder, tensor_parallel_size=2, **SMALL) as llm:
        stream = llm.stream("fox", greedy(5))
        next(stream)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        calls: dict[str, Callable[[], object]] = {
            "stream": lambda: next(stream),
            "generate": lambda: llm.generate("fox", use_tqdm=False),
            "refused": lambda: llm.generate({"prompt_token_ids": []}, use_tqdm=False),
            "chat": lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
            "update": lambda: llm.update_weights(theirs.state_dict()),
            "sleep": llm.sleep,
            "wake up": llm.wake_up,
            "new stream": lambda: next(llm.stream("fox")),
        }
        for call in calls.values():
            with pytest.raises(
                RankError, match=rf"rank 1 \(pid {worker.pid}\) was killed"
            ) as raised:
                call()
            assert raised.value.ranks == (1,)
    assert not multiprocessing.active_children()


def test_an_engine_does_not_survive_a_fork(folder: Path) -> None:
    """A fork while another thread generates says so at once, and its close ends nothing."""
    with LLM(folder, **SMALL) as llm:
        with llm.engine.lock:  # as a step of another thread holds it
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    llm.generate("fox", greedy(3), use_tqdm=False)
                except RuntimeError as error:
                    code = 0 if "a fork of it, has none of its threads" in str(error) else 2
                finally:
                    llm.close()
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert llm.generate("fox", greedy(3), False)[0].outputs[0].token_ids


@pytest.mark.parametrize(("own", "eos"), [(40, "#40"), (0, "a")])
def test_it_ends_at_what_any_file_calls_an_end(
    folder: Path, tmp_path: Path, own: int, eos: str
) -> None:
    """The tokenizer's, generation_config's and config's; only the first is no ``stop_reason``."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name, ends in (("generation_config.json", [5, 129]), ("config.json", 7)):
        entries = json.loads((copy / name).read_text()) | {"eos_token_id": ends}
        (copy / name).write_text(json.dumps(entries))
    entries = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(entries | {"eos_token": eos}))
    with LLM(copy, **SMALL) as llm:
        for token, reason in ((5, 5), (129, 129), (7, 7), (own, None)):
            params = greedy(6, logit_bias={token: 100.0}, skip_special_tokens=False)
            (output,) = llm.generate("once", params, False)[0].outputs
            assert (output.token_ids, output.finish_reason) == ([token], "stop")
            assert (output.stop_reason, output.text) == (reason, "")
            params = greedy(6, logit_bias={token: 100.0}, ignore_eos=True)
            (output,) = llm.generate("once", params, False)[0].outputs
            assert output.token_ids == [token] * 6


def test_weights_of_a_device_sleep_in_host_memory(
    folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back with their updates, also after a sleep for which there was no room."""
    head = theirs.lm_head.weight.detach().flip(0).contiguous()

    def no_room(nbytes: int, ranks: int) -> None:
        raise MemoryError

    with LLM(folder, **SMALL) as llm:
        llm.update_weights({"lm_head.weight": head})
        updated = first_tokens(llm)
        model = llm.executor.worker.model
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "device", torch.device("cuda"))
            patch.setattr(workers, "_check_host_memory", no_room)
            with pytest.raises(MemoryError):
                llm.sleep()
        assert first_tokens(llm) == updated
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "device", torch.device("cuda"))
            llm.sleep()
        assert all(parameter.is_meta for parameter in model.parameters())
        llm.wake_up()
        assert first_tokens(llm) == updated


def test_what_does_not_fit_into_host_memory_is_named() -> None:
    """The sizes of all ranks, what is available, and the level that needs nothing."""
    workers._check_host_memory(1 << 10, 2)
    with pytest.raises(MemoryError, match=r"2 ranks take 1048576\.0 GiB .* sleep\(level=2\) drops"):
        workers._check_host_memory(1 << 49, 2)

"""Code that was written for vLLM: its arguments at their defaults, and what it reads."""

from __future__ import annotations

import inspect
import io
import json
import runpy
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tqdm import tqdm

from vllm_module import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from vllm_module.config import EngineConfig, ModelConfig
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime import requests
from vllm_module.runtime.arguments import LLM_ARGUMENTS, known_arguments

DEFAULTS = json.loads(Path(__file__).with_name("vllm_defaults.json").read_text())  # of vLLM 0.32
PARITY = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "parity.py"))
OWN = EngineConfig.model_fields.keys() | inspect.signature(LLM.__init__).parameters.keys()
# Ours differ: a CPU has no GPU memory to share.
OTHERS = {"gpu_memory_utilization": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "model"
    PARITY["write_checkpoint"](folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20, max_num_seqs=8) as llm:
        yield llm


def greedy(most: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **params)


def test_every_argument_of_vllm_is_accepted_at_its_default(folder: Path) -> None:
    """An engine is made with all of them at once; nothing else in the signatures is unknown."""
    given = {**DEFAULTS["EngineArgs"], **DEFAULTS["LLM"], "model": str(folder)}
    with LLM(**given | {"kv_cache_memory_bytes": 1 << 20}) as llm:
        assert len(llm.generate("a", greedy(2), use_tqdm=False)[0].outputs[0].token_ids) == 2
    for name, value in given.items():
        if name not in OWN:
            assert known_arguments("LLM", {name: value}, (), LLM_ARGUMENTS) == {}


@pytest.mark.parametrize("name", ["seed", "max_logprobs", "max_model_len", "enforce_eager"])
def test_defaults_of_what_both_have_are_vllms(name: str) -> None:
    """What changes tokens or what is refused has the same default."""
    assert getattr(EngineArgs(), name) == DEFAULTS["EngineArgs"][name]


def test_every_parameter_of_vllm_is_accepted_and_read() -> None:
    """Sampling parameters at vLLM's defaults are ours, and each can be read."""
    given = dict(DEFAULTS["SamplingParams"])
    params = SamplingParams(**given)
    assert params.model_dump() == SamplingParams().model_dump()
    ours = {"stop": [], "stop_token_ids": [], "bad_words": []}  # as vLLM has them later
    for name, value in given.items():
        for each in (params, SamplingParams()):
            assert getattr(each, name) == ours.get(name, value), name
    assert SamplingParams(output_kind=2).output_kind == 2  # type: ignore[call-arg]


def test_methods_take_vllms_arguments_at_their_defaults(llm: LLM) -> None:
    """Those of adapters, priorities and multimodal models may be given where they say nothing."""
    for name, arguments in DEFAULTS["methods"].items():
        method = getattr(llm, name)
        first: tuple[Any, ...] = ("abc",)
        if name == "chat":
            first = ([{"role": "user", "content": "abc"}],)
        if name in ("embed", "encode", "classify", "score"):
            first = first * (1 + (name == "score"))
            with pytest.raises(UnsupportedModelError, match="only an encoder"):
                method(*first, **arguments)
        elif name == "beam_search":
            continue  # it needs parameters; tests/runtime/test_parity.py searches
        elif name in ("generate", "chat"):
            (output,) = method(*first, **arguments | {"use_tqdm": False})
            assert output.error is None
        else:
            method(**arguments)
    llm.wake_up()
    with pytest.raises(ValueError, match=r"LLM.generate\(priority=1\) of vLLM is not supported"):
        llm.generate("a", priority=1)
    with pytest.raises(ValueError, match="no argument 'lora_requests': did you mean"):
        llm.generate("a", lora_requests=None)


def test_engine_args_make_an_engine(folder: Path) -> None:
    """The dataclass has vLLM's names, and both ways of making an engine of it work."""
    args = EngineArgs(model=str(folder), kv_cache_memory_bytes=1 << 20, reasoning_parser="")
    assert repr(args).startswith("EngineArgs(model=")
    assert "reasoning_parser" not in repr(args)
    for llm in (LLM.from_engine_args(args), LLM(**vars(args))):
        with llm:
            assert llm.model_config.model == str(folder)
            assert (llm.model_config.max_model_len, llm.model_config.get_vocab_size()) == (64, 130)
            assert llm.model_config.get_hidden_size() == 64
            assert llm.model_config.hf_config.num_hidden_layers == 2
            assert llm.model_config.dtype == torch.float32
    with pytest.raises(TypeError, match="modle"):
        EngineArgs(modle="x")


def test_prompts_of_every_form(llm: LLM) -> None:
    """Token ids, a list of them, and mappings are the same prompt."""
    ids = [3, 4, 5]
    forms: list[Any] = [ids, [ids], tuple(ids), TokensPrompt(prompt_token_ids=ids), "def"]
    forms += [TextPrompt(prompt="def"), {"prompt_token_ids": ids, "multi_modal_data": None}]
    forms += [{"prompt": "def", "multi_modal_data": {}, "mm_processor_kwargs": {}}]
    outputs = [llm.generate(form, greedy(4), use_tqdm=False) for form in forms]
    assert all(isinstance(each, RequestOutput) for (each,) in outputs)
    assert len({tuple(each.outputs[0].token_ids) for (each,) in outputs}) == 1
    wrongs: list[Any] = [[3, True], [[]], torch.tensor(ids), {"prompt_token_ids": "def"}, {}]
    for wrong in (*wrongs, {"prompt_token_ids": ids, "multi_modal_data": {"image": 1}}):
        with pytest.raises(ValueError, match=r"prompt should be|multimodal|no tokens"):
            llm.generate(wrong, greedy(4), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncation": True, "max_length": 3}, 3),
        ({"truncation": "longest_first", "max_length": 3}, 3),
        ({"truncation": False, "max_length": 3}, 100),
        ({"truncation": "do_not_truncate"}, 100),
        ({"truncation": True}, 63),  # of 64, which are the prompt's and a token of the output
        ({"truncate_prompt_tokens": 4}, 4),
        ({"truncate_prompt_tokens": -1}, 63),
        ({"truncate_prompt_tokens": None, "truncation": None, "padding": False}, 100),
    ],
)
def test_tokenization_is_that_of_transformers(llm: LLM, options: dict[str, Any], kept: int) -> None:
    """Truncation cuts the end of texts, of token ids, and of conversations."""
    text = ("abcdefghij" * 10)[: 100 if kept < 100 else 40]
    ids = llm.get_tokenizer().encode(text)
    given: dict[str, Any] = {"use_tqdm": False, "tokenization_kwargs": options}
    for prompt in (text, {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt, greedy(1), **given)
        assert output.prompt_token_ids == ids[:kept]
    (output,) = llm.chat([{"role": "user", "content": text}], greedy(1), **given)
    assert output.prompt is not None
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)[:kept]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": True}, r"tokenization_kwargs\(padding=True\) of vLLM is not supported"),
        ({"max_length": 0}, "tokenization_kwargs should keep at least 1 token"),
        ({"truncate_prompt_tokens": -2}, "tokenization_kwargs should keep at least 1 token"),
        ({"truncation": 3}, "truncation of tokenization_kwargs should be True or False, got 3"),
        ({"max_length": True}, "max_length of tokenization_kwargs should be an integer"),
        ({"add_special_tokens": 1}, "add_special_tokens of tokenization_kwargs should be True"),
        ({"max_lenght": 3}, "no argument 'max_lenght': did you mean 'max_length'"),
        ([3], r"tokenization_kwargs should be a mapping or None, got \[3\]"),
    ],
)
def test_other_options_of_a_tokenizer_are_refused(llm: LLM, options: Any, message: str) -> None:
    """The message names the option."""
    with pytest.raises(ValueError, match=message):
        llm.generate("a", greedy(1), False, tokenization_kwargs=options)


def test_beams_end_at_the_contexts_end(llm: LLM) -> None:
    """They have as many tokens as a request has there; parameters of another kind are refused."""
    (found,) = llm.beam_search("a" * 60, BeamSearchParams(2, 100, ignore_eos=True))
    assert [(len(each.tokens), each.finish_reason) for each in found.sequences] == [
        (64, "length"),
        (64, "length"),
    ]
    for sequence in found.sequences:
        for token, entry in zip(sequence.tokens[60:], sequence.logprobs, strict=True):
            assert entry[token].decoded_token == llm.get_tokenizer().decode(token)
    with pytest.raises(ValueError, match="params should be BeamSearchParams, got SamplingParams"):
        llm.beam_search("a", greedy(1))  # type: ignore[arg-type]
    for penalty in ("x", None, float("nan"), True):
        with pytest.raises(ValueError, match="length_penalty should be a finite number"):
            BeamSearchParams(2, 2, length_penalty=penalty)  # type: ignore[arg-type]


def test_a_progress_bar_may_be_a_callers_own(llm: LLM) -> None:
    """It is made with the number of prompts, and counts those that are refused as done."""
    made: list[Any] = []

    def make(**given: Any) -> Any:
        made.append(tqdm(**given, file=io.StringIO()))
        return made[-1]

    llm.generate(["a", "b", ""], greedy(2), make)
    llm.beam_search("a", BeamSearchParams(2, 3), use_tqdm=make)
    assert [(bar.total, bar.initial, bar.n) for bar in made] == [(3, 1, 3), (3, 0, 3)]


def test_a_salt_keeps_cached_pages_apart(llm: LLM) -> None:
    """Pages are reused among prompts with the same salt only; tokens stay the same."""
    llm.reset_prefix_cache()
    ids = [*range(10, 50)]

    def cached(**options: Any) -> int | None:
        (output,) = llm.generate({"prompt_token_ids": ids, **options}, greedy(3), use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
        return output.num_cached_tokens

    tokens: list[list[int]] = []
    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 32, 0, 32]
    assert [cached(cache_salt="b"), cached(cache_salt=None)] == [0, 32]
    assert llm.reset_prefix_cache() is True
    assert [cached(), cached(cache_salt="a")] == [0, 0]
    assert tokens == [tokens[0]] * len(tokens)
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="cache_salt should be text that is not empty"):
            cached(cache_salt=wrong)


def test_a_request_keeps_the_parameters_it_was_added_with(llm: LLM) -> None:
    """What a caller changes while a request runs changes the next request only."""
    params = greedy(12, stop=["zzzz"])
    stream = llm.stream("once upon", params)
    next(stream)
    params.max_tokens = 2
    params.stop.append("e")
    *_, last = stream
    (expected,) = llm.generate("once upon", greedy(12), use_tqdm=False)
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("samples", [1, 3])
def test_metrics_of_a_request_and_of_the_engine(llm: LLM, samples: int) -> None:
    """Times are in order, and sums grow by what a request did; its samples have steps together."""

    def numbers() -> dict[str, Any]:
        found = {each.name: each for each in llm.get_metrics()}
        return {name: getattr(each, "value", each) for name, each in found.items()}

    before = numbers()
    params = greedy(5, ignore_eos=True, n=samples)
    (output,) = llm.generate("once upon", params, use_tqdm=False)
    metrics = output.metrics
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts < metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (5 * samples, 0)
    assert metrics.arrival_time > 1.7e9
    assert output.lora_request is None
    assert output.outputs[0].finished()
    after = numbers()
    for name, seconds in {
        "time_to_first_token": metrics.first_token_latency,
        "request_time_per_output_token": (metrics.last_token_ts - metrics.first_token_ts) / 4,
        "e2e_request_latency": metrics.last_token_ts - metrics.queued_ts,
    }.items():
        old, new = (each[f"vllm:{name}_seconds"] for each in (before, after))
        assert new.count - old.count == new.buckets["+Inf"] - old.buckets["+Inf"] == 1
        assert new.sum - old.sum == pytest.approx(seconds)
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == 5 * samples
    assert after["vllm:prompt_tokens"] - before["vllm:prompt_tokens"] == 9
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert after["vllm:kv_cache_usage_perc"] == 0


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_function_sees_the_model_of_every_rank(llm: LLM, folder: Path) -> None:
    """Results come by rank; what cannot be sent is refused; what a function raises is raised."""
    (whole,) = llm.apply_model(count_parameters)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20, tensor_parallel_size=2) as two:
        parts = two.apply_model(torch.nn.Module.__repr__)
        assert len(parts) == 2
        with pytest.raises(ValueError, match="a function that a module defines"):
            two.apply_model(lambda model: model)
        with pytest.raises(AttributeError):
            two.apply_model(torch.nn.Module.get_extra_state_of_nobody)  # type: ignore[attr-defined]
        assert two.generate("a", greedy(2), use_tqdm=False)[0].error is None
    assert whole > 0
    with pytest.raises(ValueError, match="func should be a function"):
        llm.apply_model(3)  # type: ignore[arg-type]


def test_the_generation_config_of_another_folder_and_overrides(
    folder: Path, tmp_path: Path
) -> None:
    """A folder's file replaces the model's, and entries of the caller replace the file's."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 7}')
    override = {"top_k": 5, "temperature": 0.0}
    given: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "generation_config": str(tmp_path)}
    with LLM(str(folder), **given, override_generation_config=override) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.0, 5)
        assert llm.engine.stop_token_ids == {7, 129}
    with pytest.raises(ValueError, match="override_generation_config: top_k"):
        LLM(str(folder), **given, override_generation_config={"top_k": "many"})
    with pytest.raises(ValueError, match=r"or a folder that has a generation_config\.json"):
        LLM(str(folder), generation_config=str(tmp_path / "nowhere"))


def test_a_chat_template_of_the_engine(folder: Path, tmp_path: Path) -> None:
    """It is text, or the path of a file."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    messages = [{"role": "user", "content": "hi"}]
    for template in (path, str(path), path.read_text()):
        with LLM(str(folder), kv_cache_memory_bytes=1 << 20, chat_template=template) as llm:
            assert llm.chat_prompt(messages)["prompt"] == "hi!"
    with pytest.raises(ValueError, match="no file that can be read"):
        LLM(str(folder), kv_cache_memory_bytes=1 << 20, chat_template="nowhere.jinja")


def test_the_tokenizer_has_the_methods_of_transformers(llm: LLM, folder: Path) -> None:
    """Ids, tokens and texts are those of transformers' tokenizer."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = llm.get_tokenizer()
    text, ids = "the quick fox", [19, 7, 128, 4, 129]
    assert ours(text) == {k: v for k, v in theirs(text).items() if k in ours(text)}
    assert ours([text, "a"])["input_ids"] == theirs([text, "a"])["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(4) == theirs.decode(4)
    assert ours.batch_decode([ids, [1]]) == theirs.batch_decode([ids, [1]])
    for name in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "eos_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_tokens_to_ids(["a", "</s>"]) == theirs.convert_tokens_to_ids(["a", "</s>"])
    assert ours.convert_tokens_to_ids("b") == theirs.convert_tokens_to_ids("b")
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours(text).input_ids == theirs(text).input_ids
    cut: dict[str, Any] = {"truncation": True, "max_length": 3}
    assert ours(text, **cut)["input_ids"] == theirs(text, **cut)["input_ids"]
    for array in (torch.tensor(ids), numpy.array(ids), tuple(ids)):
        assert ours.decode(array) == theirs.decode(ids)
    assert ours.batch_decode(torch.tensor([ids])) == theirs.batch_decode([ids])
    tokens = theirs.convert_ids_to_tokens(ids, skip_special_tokens=True)
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == tokens
    assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)
    assert ours.tokenize(text) == theirs.tokenize(text)
    for name in ("all_special_tokens", "all_special_ids"):
        assert sorted(getattr(ours, name)) == sorted(getattr(theirs, name))
    for name in ("unk_token", "unk_token_id", "sep_token", "mask_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    with pytest.raises(AttributeError, match="no 'nothing'"):
        ours.nothing  # noqa: B018
    with pytest.raises(ValueError, match="a text to encode should be a string, got 3"):
        ours.encode(3)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "hi"}]
    given: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(messages, **given) == theirs.apply_chat_template(
        messages, **given
    )
    assert ours.apply_chat_template(messages) == theirs.encode(
        theirs.apply_chat_template(messages, tokenize=False), add_special_tokens=False
    )
    both = [messages, [*messages, {"role": "assistant", "content": "a"}]]
    assert ours.apply_chat_template(both, **given) == theirs.apply_chat_template(both, **given)
    encoded = theirs.apply_chat_template(both, return_dict=True)
    assert ours.apply_chat_template(both, return_dict=True) == dict(encoded)


def test_model_config_is_frozen(llm: LLM) -> None:
    """What was read of the model cannot be changed by mistake."""
    assert isinstance(llm.model_config.model, str)
    assert not isinstance(llm.model_config, ModelConfig)
    with pytest.raises(AttributeError):
        llm.model_config.dtype = torch.float16  # type: ignore[misc]


def test_an_engine_is_shown_as_a_table(llm: LLM, folder: Path) -> None:
    """``repr`` and a notebook show what is served, escaped, and no module tree."""
    text, html = repr(llm), llm._repr_html_()
    for part in ("Qwen3ForCausalLM, float32", "cpu, ranks: 1", "at most 64 tokens", "ready"):
        assert part in text
        assert part in html
    assert len(text.splitlines()) == 10
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as other:
        other.sleep()
        assert "the engine sleeps: wake_up() first" in repr(other)
    for shown in (repr(other), other._repr_html_()):
        assert "it was closed" in shown
    with pytest.raises(RuntimeError, match="it was closed"):
        other.apply_model(count_parameters)
    assert repr(LLM.__new__(LLM)) == "LLM\n  state  not loaded"


def test_engine_args_of_a_command_line(folder: Path) -> None:
    """Options have the arguments' names; values are read as JSON where no text is meant."""
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--own")
    line = f"--model {folder} --max-model-len 32 --revision 12 --enforce-eager --own x"
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert (args.model, args.max_model_len, args.revision) == (str(folder), 32, "12")
    assert args.enforce_eager is True
    assert EngineArgs.from_cli_args(Namespace(model="a", own=1)) == EngineArgs(model="a")
    rest = vars(args) | {"model": "", "max_model_len": None, "revision": None}
    assert rest | {"enforce_eager": False} == vars(EngineArgs(model=""))


def test_a_search_of_beams_that_is_refused_leaves_no_request(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1] * 64}]
    with pytest.raises(ValueError, match="the prompt has 64 tokens"):
        llm.beam_search(prompts, BeamSearchParams(2, 3))
    assert not llm.engine.requests
    with pytest.raises(ValueError, match="no adapter is called 'x'"):
        llm.beam_search({"prompt_token_ids": [1, 2], "adapter": "x"}, BeamSearchParams(2, 3))


def test_bad_words_that_the_model_has_no_token_for_are_refused_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They failed in the middle of a step, and ended all other requests with it."""
    tokens = llm.engine.vocab_size, 1
    monkeypatch.setattr(requests, "encode_bad_words", lambda words, _: [[*tokens]])
    bad, good = llm.generate(["a", "a"], [greedy(3, bad_words=["[PAD]"]), greedy(3)], False)
    assert "outside of the vocabulary" in str(bad.error)
    assert len(good.outputs[0].token_ids) == 3

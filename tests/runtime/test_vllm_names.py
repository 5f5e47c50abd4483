"""Code that was written for vLLM: its arguments at their defaults, and what it reads."""

from __future__ import annotations

import inspect
import json
import runpy
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, EngineArgs, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from vllm_module.config import EngineConfig, ModelConfig
from vllm_module.errors import UnsupportedModelError
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
    del given["output_text_buffer_length"]  # vLLM's own
    params = SamplingParams(**given)
    assert params.model_dump() == SamplingParams().model_dump()
    for name, value in given.items():
        found = getattr(params, name)
        assert found == value or (value is None and found in ([], -1, 1, False)), name
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
            assert llm.model_config.hf_config.num_hidden_layers == 2
            assert llm.model_config.dtype == torch.float32
    with pytest.raises(TypeError, match="modle"):
        EngineArgs(modle="x")


def test_prompts_of_every_form(llm: LLM) -> None:
    """Token ids, a list of them, and mappings are the same prompt."""
    ids = [3, 4, 5]
    forms: list[Any] = [ids, [ids], tuple(ids), TokensPrompt(prompt_token_ids=ids), "def"]
    forms += [TextPrompt(prompt="def"), {"prompt_token_ids": ids, "multi_modal_data": None}]
    outputs = [llm.generate(form, greedy(4), use_tqdm=False) for form in forms]
    assert all(isinstance(each, RequestOutput) for (each,) in outputs)
    assert len({tuple(each.outputs[0].token_ids) for (each,) in outputs}) == 1
    for wrong in ([3, True], {"prompt_token_ids": ids, "multi_modal_data": {"image": 1}}, [[]]):
        with pytest.raises(ValueError, match=r"prompt should be|multimodal|no tokens"):
            llm.generate(wrong, greedy(4), use_tqdm=False)


def test_tokenization_is_that_of_transformers(llm: LLM) -> None:
    """Truncation cuts the end; unknown options are refused."""
    (output,) = llm.generate(
        "abcdef", greedy(1), False, tokenization_kwargs={"truncation": True, "max_length": 3}
    )
    assert output.prompt_token_ids == [0, 1, 2]
    for options in ({"padding": True}, {"max_length": 0}, {"truncation": 3}):
        with pytest.raises(ValueError, match="tokenization_kwargs should"):
            llm.generate("a", greedy(1), False, tokenization_kwargs=options)


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


def test_metrics_of_a_request_and_of_the_engine(llm: LLM) -> None:
    """Times are in order, and sums grow by what a request did."""
    before = {metric.name: metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]
    (output,) = llm.generate("once upon", greedy(5, ignore_eos=True), use_tqdm=False)
    metrics = output.metrics
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts < metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (5, 0)
    assert metrics.arrival_time > 1.7e9
    assert output.lora_request is None
    assert output.outputs[0].finished()
    after = {metric.name: metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == 5
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
    messages = [{"role": "user", "content": "hi"}]
    given: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(messages, **given) == theirs.apply_chat_template(
        messages, **given
    )
    assert ours.apply_chat_template(messages) == theirs.encode(
        theirs.apply_chat_template(messages, tokenize=False), add_special_tokens=False
    )


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
    assert len(text.splitlines()) == 8
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as other:
        other.sleep()
        assert "the engine sleeps: wake_up() first" in repr(other)
    assert repr(LLM.__new__(LLM)) == "LLM\n  state  not loaded"


def test_engine_args_of_a_command_line(folder: Path) -> None:
    """Options have the arguments' names; values are read as JSON where no text is meant."""
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.add_argument("--own")
    line = f"--model {folder} --max-model-len 32 --revision 12 --enforce-eager --own x"
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert (args.model, args.max_model_len, args.revision) == (str(folder), 32, "12")
    assert args.enforce_eager is True
    rest = vars(args) | {"model": "", "max_model_len": None, "revision": None}
    assert rest | {"enforce_eager": False} == vars(EngineArgs(model=""))

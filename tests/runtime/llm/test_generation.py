"""``LLM``: prompts in, text out."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.errors import CheckpointFormatError

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
SMALL, generated, greedy, ids_of = (
    ASKING[name] for name in ("SMALL", "generated", "greedy", "ids_of")
)


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


@pytest.mark.at_length
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

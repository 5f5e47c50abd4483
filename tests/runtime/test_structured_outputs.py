"""Outputs that follow a schema, an expression, a choice or a grammar."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams, StructuredOutputsParams

# Tokens of several characters cross the edges of what a grammar names.
TOKENS = [*string.printable[:95], '{"', '": ', '"}', "12", "true", "ab", "ba", "aab", "}]"]
END = len(TOKENS)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "ba"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(TOKENS) + 8,  # the last have no text
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=END,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 1.0 if "norm" in name else 0.4, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    theirs.save_pretrained(folder)
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [encode.pre_tokenize_str(token)[0][0] for token in TOKENS]
    tokenizer = FastTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("", "isolated"), encode]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, kv_cache_memory_bytes=1 << 20, max_num_seqs=8) as llm:
        yield llm


def following(**what: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, structured_outputs=what)


@torch.no_grad()
def greedy_by_hand(model: Any, prompt: list[int], pattern: str, most: int) -> list[int]:
    """Return the most probable tokens whose text may still become a match, by the regex package."""
    output: list[int] = []
    text = ""
    for _ in range(most):
        logits = model(torch.tensor([prompt + output])).logits[0, -1]
        allowed = [
            index
            for index, token in enumerate(TOKENS)
            if regex.fullmatch(pattern, text + token, partial=True)
        ]
        if regex.fullmatch(pattern, text):
            if not allowed:
                break
            allowed.append(END)
        output.append(max(allowed, key=lambda index: logits[index].item()))
        if output[-1] == END:
            break
        text += TOKENS[output[-1]]
    return output


@pytest.mark.parametrize("pattern", ["(ab|ba){2,6}x?", "[a-c]*[0-9]{3}", "true|tru|12+", "a{1,40}"])
def test_tokens_are_the_most_probable_that_an_expression_allows(
    llm: LLM, theirs: Any, pattern: str
) -> None:
    """The tokens are those of transformers' logits and the regex package's partial matches."""
    for prompt in ([5, 6, 7], [50]):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], following(regex=pattern))
        expected = greedy_by_hand(theirs, prompt, pattern, 60)
        assert list(output.outputs[0].token_ids) == expected
        assert output.outputs[0].finish_reason == "stop"


def test_every_sample_follows_its_own_schema_in_one_batch(llm: LLM) -> None:
    """Samples, random draws and requests without a grammar share steps and stay apart."""
    free = SamplingParams(temperature=0, max_tokens=12)
    few_spaces = {"max_tokens": 80, "logit_bias": {TOKENS.index(" "): -50.0}}  # JSON allows many
    params = [
        SamplingParams(n=4, seed=3, structured_outputs={"json": SCHEMA}, **few_spaces),
        SamplingParams(n=2, seed=4, structured_outputs={"json": json.dumps(SCHEMA)}, **few_spaces),
        following(choice=["abba", 'a"b\\']),
        following(grammar='start: "[" /[0-9]/ ("," /[0-9]/)~2 "]"'),
        following(grammar='root ::= "<" [xy] [xy] ">"'),
        free,
    ]
    prompts = [{"prompt_token_ids": [index + 1, 9]} for index in range(len(params))]
    outputs = llm.generate(prompts, params)
    for output in outputs[:2]:
        for sample in output.outputs:
            value = json.loads(sample.text)
            assert value["name"] in ("ab", "ba")
            assert isinstance(value["n"], int)
            assert value["n"] <= 99
            assert sample.finish_reason == "stop"
    assert outputs[2].outputs[0].text in ("abba", 'a"b\\')
    assert regex.fullmatch(r"\[\d,\d,\d\]", outputs[3].outputs[0].text)
    assert regex.fullmatch("<[xy]{2}>", outputs[4].outputs[0].text)
    alone = llm.generate(prompts[-1:], free)
    assert outputs[-1].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_preemption_and_async_scheduling_change_no_token(folder: Path, llm: LLM) -> None:
    """With few pages, with each token read before the next step, the tokens are the same."""
    prompts = [{"prompt_token_ids": [index, 3]} for index in range(6)]
    params = following(regex="(a|ab|ba){30,40}")
    expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    for options in ({"kv_cache_memory_bytes": 1 << 14}, {"async_scheduling": False}):
        given = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 8, **options}
        with LLM(folder, **given) as other:
            outputs = other.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in outputs] == expected


def test_logprobs_are_those_of_the_model(llm: LLM, theirs: Any) -> None:
    """A mask changes the choice, and not the logprobs that are returned."""
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=0, structured_outputs={"regex": "a{9}"}
    )
    (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], params)
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        logprobs = theirs(torch.tensor([[1, 2, *tokens]])).logits.log_softmax(-1)[0]
    for place, (token, entry) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
        assert entry[token].logprob == pytest.approx(logprobs[1 + place, token].item(), abs=1e-4)


def test_a_text_that_must_follow_has_the_tokens_of_the_tokenizer(llm: LLM, folder: Path) -> None:
    """Other tokens of the same text are not chosen, and without the tokenizer's the request ends.

    They are those of the tokenizers package, which has a token for each character here.
    """
    encoded = FastTokenizer.from_file(str(folder / "tokenizer.json")).encode("aab").ids
    assert len(encoded) == 3
    params = following(regex="aab")
    params.logit_bias = {TOKENS.index(text): 100.0 for text in ("aab", "ab")}
    (output,) = llm.generate([{"prompt_token_ids": [1]}], params)
    assert list(output.outputs[0].token_ids) == encoded
    params.bad_words = ["b"]
    (output,) = llm.generate([{"prompt_token_ids": [1]}], params)
    assert output.error is not None
    assert "leave no token to choose" in output.error


def test_an_output_ends_where_nothing_may_follow(llm: LLM) -> None:
    """With the end token ignored or banned by min_tokens, a complete output still ends."""
    what = {"choice": ["ab"]}
    for others in ({"ignore_eos": True}, {"min_tokens": 20}):
        params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=what, **others)
        (output,) = llm.generate([{"prompt_token_ids": [1]}], params)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "stop")
    params = following(regex="a*b")
    params.stop, params.logit_bias = ["aa"], {TOKENS.index("a"): 100.0}
    (output,) = llm.generate([{"prompt_token_ids": [1]}], params)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", "aa")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"regex": "(ab"}, "structured_outputs cannot be followed: (?s:.*)unclosed group"),
        ({"json": {"type": "frob"}}, "structured_outputs cannot be followed: Invalid type: frob"),
        ({"json": "{"}, "structured_outputs cannot be followed"),
        ({"grammar": "start: x"}, "structured_outputs cannot be followed: (?s:.*)unknown name"),
    ],
)
def test_what_cannot_be_followed_is_refused_when_the_request_comes(
    llm: LLM, what: dict[str, Any], message: str
) -> None:
    """The message has llguidance's reason, and the engine goes on."""
    with pytest.raises(ValueError, match=message):
        llm.generate([{"prompt_token_ids": [1]}], following(**what))
    assert llm.generate([{"prompt_token_ids": [1]}], following(choice=["ab"]))[0].outputs[0].text


CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5_000)), 'r5000: "a"'])
REFERENCES = {
    "$ref": "#/$defs/r0",
    "$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(5_000)} | {"r5000": {}},
}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"grammar": CHAIN}, "compiling it needs more than the stack: it leads too deep"),
        ({"json": REFERENCES}, "compiling it needs more than the stack"),
        ({"json": json.dumps(REFERENCES)}, "compiling it needs more than the stack"),
        ({"json": {"enum": ["\ud800"]}}, "lone leading surrogate|end of hex escape"),
        ({"json": {"enum": [b"x"]}}, "bytes is not JSON serializable"),
    ],
    ids=["rules", "references", "text", "half a pair", "no JSON"],
)
def test_what_would_end_the_process_is_refused(llm: LLM, asked: dict[str, Any], named: str) -> None:
    """The library overflows the stack while it compiles some of these."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked), max_tokens=4)
    with pytest.raises(ValueError, match=named):
        llm.generate("a", params, use_tqdm=False)


def test_exactly_one_form_is_given() -> None:
    """Neither none nor two of them, nor an unknown one."""
    for wrong in ({}, {"json": {}, "regex": "a"}, {"choice": []}, {"regex": ""}, {"regx": "a"}):
        with pytest.raises(ValueError, match=r"structured_outputs|choice|regex|regx"):
            SamplingParams(structured_outputs=wrong)
    assert StructuredOutputsParams(json={"type": "null"}).json_schema == {"type": "null"}


def test_a_grammar_that_fails_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher's own error is the request's; others in the step go on."""
    from vllm_module.runtime.sampling.grammar import Grammar

    take = Grammar._take

    def failing(self: Grammar, output: Any) -> None:
        take(self, output)
        if len(output) == 3:
            self.error = "structured_outputs: too much work"

    monkeypatch.setattr(Grammar, "_take", failing)
    prompts = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, [following(regex="a{9}"), free])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert len(outputs[1].outputs[0].token_ids) == 8


def test_an_expression_that_explodes_ends_its_request_alone(llm: LLM) -> None:
    """It is given up after a bounded amount of work; others in the step go on."""
    prompts = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = llm.generate(prompts[1:], free)[0].outputs[0].token_ids
    outputs = llm.generate(prompts, [following(regex="(((a{100}){100}){100}){100}"), free])
    assert "too many expressions" in outputs[0].error
    assert outputs[1].outputs[0].token_ids == expected


def test_a_token_that_takes_too_much_work_ends_its_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check of a grammar has not met is given up where it is met; others go on."""
    from vllm_module.runtime.sampling import grammar

    params = following(regex="[ab]{9}")
    llm.engine.grammars.compile(params.structured_outputs)
    monkeypatch.setattr(grammar, "_SLOW", -1.0)
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]
    outputs = llm.generate(prompts, [params, free])
    assert outputs[0].error == "structured_outputs: one token takes more than -1 s of work"
    assert len(outputs[1].outputs[0].token_ids) == 8

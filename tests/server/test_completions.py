"""/v1/completions, judged by OpenAI's client, by ``LLM`` and by transformers."""

from __future__ import annotations

import asyncio
import json
import runpy
import shutil
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM, SamplingParams

load = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["load"]
TEXTS = ["hello", "the sky is", "a", "né à 12:30"]
GREEDY = {"temperature": 0, "max_tokens": 8}


def whole(server: Any, **body: Any) -> Any:
    return server.client().completions.create(model="tiny", **body)


def streamed(server: Any, **body: Any) -> dict[int, Any]:
    """Return the text, finish reason, tokens and logprobs of each choice, joined from chunks."""
    found: dict[int, Any] = {}
    stream = server.client().completions.create(model="tiny", stream=True, **body)
    for chunk in stream:
        for choice in chunk.choices:
            joined = found.setdefault(choice.index, {"text": "", "reason": None, "lists": {}})
            assert joined["reason"] is None, "nothing follows the end of a choice"
            joined["text"] += choice.text
            joined["reason"] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                joined["lists"].setdefault(name, []).extend(values)
    return found


def test_texts_are_those_of_llm(server: Any, sync: LLM) -> None:
    """Greedy and seeded, alone and in a list, with several samples, whole and streamed."""
    several = {"temperature": 1.2, "seed": 5, "n": 3, "top_p": 0.9}
    ends = {"max_tokens": 40, "stop": list("aeinorst <{0123456789")}  # at different times
    for body in (GREEDY, {**several, "max_tokens": 8}, {**several, **ends}):
        expected = [
            (sample.text, sample.finish_reason)
            for output in sync.generate(TEXTS, SamplingParams(**body), use_tqdm=False)
            for sample in output.outputs
        ]
        answer = whole(server, prompt=TEXTS, **body)
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [*range(len(expected))]
        chunks = streamed(server, prompt=TEXTS, **body)
        assert [(chunks[i]["text"], chunks[i]["reason"]) for i in sorted(chunks)] == expected
    alone = whole(server, prompt=TEXTS[0], **GREEDY)
    assert alone.choices[0].text == sync.generate(
        TEXTS[0], SamplingParams(**GREEDY), use_tqdm=False
    )[0].outputs[0].text  # fmt: skip
    assert (alone.object, alone.model) == ("text_completion", "tiny")
    usage = alone.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)


def test_token_ids_are_prompts(server: Any) -> None:
    """One list of ids, or a list of such lists; ids come back if they are wanted."""
    tokens = [server.ask("POST", "/tokenize", {"prompt": text})[1]["tokens"] for text in TEXTS]
    expected = [choice.text for choice in whole(server, prompt=TEXTS, **GREEDY).choices]
    assert [c.text for c in whole(server, prompt=tokens, **GREEDY).choices] == expected
    one = whole(server, prompt=tokens[0], extra_body={"return_token_ids": True}, **GREEDY)
    choice = one.choices[0].model_dump()
    assert choice["text"] == expected[0]
    assert (choice["prompt_token_ids"], len(choice["token_ids"])) == (tokens[0], 8)
    assert len(tokens[0]) == len("hello")


def test_special_tokens_are_those_of_the_library(folder: Path, start: Any, tmp_path: Path) -> None:
    """A text gets them unless ``add_special_tokens`` is false, also where it is left out."""
    own = shutil.copytree(folder, tmp_path / "own")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing("a $A b", None, [("a", 64), ("b", 65)])
    library.save(str(own / "tokenizer.json"))
    with start(AsyncLLM(load(own))) as server:
        for given, special in ((None, True), (True, True), (False, False)):
            expected = library.encode("hello", add_special_tokens=special).ids
            body = {"prompt": "hello", "add_special_tokens": given}
            assert server.ask("POST", "/tokenize", body)[1]["tokens"] == expected
            more = {"max_tokens": 1, "return_token_ids": True}
            _, answer = server.ask("POST", "/v1/completions", body | more)
            assert answer["choices"][0]["prompt_token_ids"] == expected
    assert len(expected) == len("hello")


def test_prompt_logprobs_are_those_of_transformers(server: Any, folder: Path) -> None:
    """In vLLM's layout: an entry for each token of the prompt, under the ids of the tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [5, 6, 7, 8]
    body = {"prompt": [ids, ids[:2]], "max_tokens": 1, "prompt_logprobs": 2}
    choices = server.ask("POST", "/v1/completions", body)[1]["choices"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for choice, own in zip(choices, (ids, ids[:2]), strict=True):
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        for at, (token, entry) in enumerate(zip(own[1:], entries, strict=True)):
            ranks = {each["rank"]: (int(id_), each["logprob"]) for id_, each in entry.items()}
            best = expected[at].topk(2)
            assert [ranks[1][0], ranks[2][0]] == best.indices.tolist()
            assert [ranks[1][1], ranks[2][1]] == pytest.approx(best.values.tolist(), abs=1e-4)
            got = entry[str(token)]
            assert got["logprob"] == pytest.approx(expected[at, token].item(), abs=1e-4)
            assert got["rank"] == 1 + (expected[at] > expected[at, token]).sum().item()
    for of_prompt, of_tokens in ((0, 3), (3, 0)):  # each has its own number
        both = {"prompt_logprobs": of_prompt, "logprobs": of_tokens, "echo": True}
        (choice, _) = server.ask("POST", "/v1/completions", {**body, **both})[1]["choices"]
        for entry, tops in zip(
            choice["prompt_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:4], strict=True
        ):
            assert max(of_prompt, 1) <= len(entry) <= of_prompt + 1
            assert max(of_tokens, 1) <= len(tops) <= of_tokens + 1
    status, answer = server.ask("POST", "/v1/completions", {**body, "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("most", [0, 1, 5])
def test_echo_has_the_logprobs_of_transformers(server: Any, folder: Path, most: int) -> None:
    """What ``lm-eval`` reads: an entry for each token of the prompt and the answer."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "the sky is blue"
    body = {"prompt": text, "echo": True, "logprobs": 3, "max_tokens": most, "temperature": 0}
    (choice,) = whole(server, **body).choices
    found = choice.logprobs
    ids = server.ask("POST", "/tokenize", {"prompt": choice.text[: len(text)]})[1]["tokens"]
    row = torch.tensor([ids])
    if most:
        mask = torch.ones_like(row)
        row = model.generate(row, attention_mask=mask, do_sample=False, max_new_tokens=most)
    with torch.no_grad():
        expected = model(row).logits[0].log_softmax(-1)
    assert len(found.tokens) == len(found.token_logprobs) == row.shape[1]
    assert (found.token_logprobs[0], found.top_logprobs[0], found.text_offset[0]) == (None, None, 0)
    assert found.tokens[: len(ids)] == list(text)
    assert found.text_offset[: len(ids)] == [*range(len(text))]
    for at in range(1, row.shape[1]):
        own = expected[at - 1, row[0, at]].item()
        assert found.token_logprobs[at] == pytest.approx(own, abs=1e-4)
        best = expected[at - 1].max().item()
        assert max(found.top_logprobs[at].values()) == pytest.approx(best, abs=1e-4)
        assert len(found.top_logprobs[at]) <= 4
    assert choice.text.startswith(text)
    assert (most > 0) == (choice.text != text)
    assert choice.finish_reason == "length"
    chunks = streamed(server, **body)[0]
    assert (chunks["text"], chunks["reason"]) == (choice.text, "length")
    assert chunks["lists"] == found.model_dump()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_echo_of_a_request_that_is_aborted(
    start: Any, engine: Any, folder: Path, until: Any, steps: int
) -> None:
    """Its client gets the prompt, with the logprobs that are computed, in both forms."""
    text, taken = "the sky is blue", 4
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 5}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with start(AsyncLLM(engine(max_num_batched_tokens=taken, max_num_seqs=4))) as server:
        _, answer = server.ask("POST", "/tokenize", {"prompt": text})
        row = torch.tensor([answer["tokens"]])
        with torch.no_grad():
            logprobs = model(row).logits[0].log_softmax(-1)
        known = [logprobs[at - 1, row[0, at]].item() for at in range(1, taken * steps + 1)]
        answers: dict[str, Any] = {}

        def ask(name: str, call: Any) -> None:
            answers[name] = call(server, **body)

        requests, llm = server.llm.llm.engine.requests, server.llm
        for name, call in (("whole", whole), ("streamed", streamed)):
            asyncio.run(llm.pause("keep"))
            thread = threading.Thread(target=ask, args=(name, call))
            thread.start()
            until(lambda: requests)
            for _ in range(steps):  # each computes a part of the prompt
                asyncio.run(llm.call(lambda each: each.engine.step()))
            asyncio.run(llm.abort(next(iter(requests))))
            thread.join()
            asyncio.run(llm.resume())
        (choice,) = answers["whole"].choices
        assert (choice.text, choice.finish_reason) == (text, "abort")
        found = choice.logprobs
        assert found.tokens == list(text)
        assert found.text_offset == [*range(len(text))]
        computed = [pytest.approx(each, abs=1e-4) for each in known]
        unknown = [None] * (len(text) - 1 - len(known))
        assert found.token_logprobs == [None, *computed, *unknown]
        assert [each is None for each in found.top_logprobs] == [
            each is None for each in found.token_logprobs
        ]
        chunks = answers["streamed"][0]
        assert (chunks["text"], chunks["reason"]) == (text, "abort")
        assert chunks["lists"] == found.model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_all_samples_of_a_request_that_is_aborted_at_its_beginning(
    server: Any, until: Any, stream: bool
) -> None:
    """There are as many choices as were asked for, of each prompt, with a reason."""
    requests, found = server.llm.llm.engine.requests, list[Any]()
    body: dict[str, Any] = {"prompt": ["hello", "a"], "n": 3, "max_tokens": 5}
    asyncio.run(server.llm.pause("keep"))
    thread = threading.Thread(
        target=lambda: found.append(streamed(server, **body) if stream else whole(server, **body))
    )
    thread.start()
    until(lambda: len(requests) == len(body["prompt"]))
    for each in [*requests]:
        asyncio.run(server.llm.abort(each))
    thread.join()
    asyncio.run(server.llm.resume())
    if stream:
        told = [(number, each["text"], each["reason"]) for number, each in found[0].items()]
    else:
        told = [(each.index, each.text, each.finish_reason) for each in found[0].choices]
    assert sorted(told) == [(number, "", "abort") for number in range(6)]


def test_stop_strings_and_usage_at_the_end(server: Any) -> None:
    """A stop string ends the text in both ways; usage comes in a chunk of its own."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 30}
    text = whole(server, **body).choices[0].text
    stop = next(text[i : i + 2] for i in range(4, 20) if "\ufffd" not in text[i : i + 2])
    answer = whole(server, stop=[stop], **body).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    joined = streamed(server, stop=stop, **body)[0]
    assert (joined["text"], joined["reason"]) == (answer.text, "stop")
    options: Any = {"include_usage": True}
    chunks = [*server.client().completions.create(
        model="tiny", stream=True, stream_options=options, **body
    )]  # fmt: skip
    assert not chunks[-1].choices
    assert chunks[-1].usage.total_tokens == 35
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_usage_in_each_chunk(server: Any, chat: bool) -> None:
    """With vLLM's continuous_usage_stats, chunks count the tokens whose ids they have brought."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    body: Any = {"model": "tiny", "stream": True, "stream_options": options, "max_tokens": 9}
    body |= {"temperature": 0, "extra_body": {"return_token_ids": True}}
    client = server.client()
    if chat:
        create = client.chat.completions.create
        chunks = [*create(messages=[{"role": "user", "content": "hello"}], **body)]
    else:
        chunks = [*client.completions.create(prompt="hello", **body)]
    brought = 0
    for chunk in chunks:
        brought += sum(len(getattr(choice, "token_ids", None) or []) for choice in chunk.choices)
        assert chunk.usage.completion_tokens == brought
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + brought
    assert brought == 9
    assert not chunks[-1].choices
    body["stream_options"] = {"continuous_usage_stats": True}  # of a usage that is not asked for
    if not chat:
        assert all(chunk.usage is None for chunk in client.completions.create(prompt="a", **body))


REFUSED = [
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported here: leave it out"),
    ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported here"),
    ({"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0, got -1"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "1 or more, or 0 with echo"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer, got True"),
    ({"prompt": "a", "n": 65}, None, "n=65 samples are more than the 64 sequences"),
    ({"prompt": "a", "logprobs": 21}, None, "21 logprobs are more than max_logprobs=20"),
    ({"prompt": {"a": 1}}, "prompt", "should be text, a list of texts, token ids"),
    ({"prompt": []}, "prompt", "should be text, a list of texts, token ids"),
    ({"prompt": ["a", [1]]}, "prompt", "should be text, a list of texts, token ids"),
    ({"prompt": [True]}, "prompt", "should be text, a list of texts, token ids"),
    ({"prompt": [[1], [256]]}, None, "prompt 1: token 256 is outside of the vocabulary of 256"),
    ({"prompt": [[1], []]}, None, "prompt 1: the prompt has no tokens"),
    ({"prompt": ["a"] * 65}, "prompt", "65 prompts, and a request may have 64"),
    ({"prompt": "a" * 1024}, None, "the prompt has 1024 tokens, and with one more a sequence has"),
    ({}, "prompt", "prompt is missing: the request needs it"),
    ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options", "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_refused(server: Any, body: dict[str, Any], param: str | None, says: str) -> None:
    """Each is a 400 in the protocol's shape, which names the field; streams are not begun."""
    for stream in (False, True):
        status, answer = server.ask("POST", "/v1/completions", {**body, "stream": stream})
        error = answer["error"]
        assert status == 400, answer
        assert says in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert (
        server.ask("POST", "/v1/completions", {"prompt": "a", "user": "u", "stop": None})[0] == 200
    )


LEAVES_NOTHING: list[dict[str, Any]] = [
    {"allowed_token_ids": [64], "bad_words": ["a"]},
    {"structured_outputs": {"regex": "aa"}, "bad_words": ["a"]},
    {"structured_outputs": {"regex": "ab"}, "bad_words": ["ab"]},  # at the second token
    {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [65]},
    {"allowed_token_ids": [64], "stop_token_ids": [64], "min_tokens": 2},
    {"bad_words": [chr(code) for code in range(33, 127)], "allowed_token_ids": [*range(94)]},
]


@pytest.mark.parametrize("body", LEAVES_NOTHING, ids=lambda body: str([*body]))
def test_what_leaves_no_token_is_refused(
    server: Any, caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    """It is the client's contradiction, and no failure of the server, in both forms."""
    for stream in (False, True):
        asked = {"prompt": "hello", "max_tokens": 4, "n": 2, "stream": stream, **body}
        status, answer = server.ask("POST", "/v1/completions", asked)
        if status == 200:  # the first token was told before
            assert (stream, body["bad_words"]) == (True, ["ab"])
            _, _, answer = answer.rpartition(b'data: {"error":')
            answer = {"error": json.loads(answer.partition(b"}")[0] + b"}")}
        else:
            assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert "leave no token to choose" in answer["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]
    assert server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 1})[0] == 200


def test_32_streams_at_once(server: Any, sync: LLM) -> None:
    """Each client gets its own text, with the tokens that it has alone."""
    prompts = [f"client {i}: {'x' * i}" for i in range(32)]
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = [each.outputs[0].text for each in sync.generate(prompts, params, use_tqdm=False)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-two") as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, stream=True, temperature=0, max_tokens=20
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(all_of_them()) == expected

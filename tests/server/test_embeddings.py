"""/v1/embeddings of an encoder, and tokens of texts."""

from __future__ import annotations

import asyncio
import re
import runpy
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from vllm_module import LLM, AsyncLLM

TEXTS = ["hello", "the sky", "né"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    config = AutoConfig.for_model(
        "bert", vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(path)
    conftest = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
    conftest["write_tokenizer"](path)
    return path


@pytest.fixture(scope="module")
def embedder(encoder: Path, start: Any) -> Iterator[Any]:
    with start(AsyncLLM(LLM(str(encoder), dtype="float32", device="cpu"))) as served:
        yield served


def test_vectors_are_those_of_transformers(embedder: Any, encoder: Path) -> None:
    """The mean of hidden states, of length 1; as numbers and as the client's base64."""
    model: Any = AutoModel.from_pretrained(encoder, dtype=torch.float32)
    expected = []
    for text in TEXTS:
        ids = embedder.ask("POST", "/tokenize", {"prompt": text})[1]["tokens"]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        expected.append(torch.nn.functional.normalize(hidden, dim=0))
    for options in ({}, {"encoding_format": "float"}):
        answer = embedder.client().embeddings.create(model="tiny", input=TEXTS, **options)
        found = torch.tensor([each.embedding for each in answer.data])
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert answer.usage.prompt_tokens == len("".join(TEXTS).encode())
    with pytest.raises(openai.BadRequestError, match="dimensions should be left out"):
        embedder.client().embeddings.create(model="tiny", input=TEXTS[0], dimensions=4)


@pytest.mark.parametrize(("most", "kept"), [(-1, 64), (1, 1), (7, 7), (63, 63)])
def test_what_is_too_long_loses_its_end(embedder: Any, most: int, kept: int) -> None:
    """``vllm bench serve`` asks so; without the field, it is refused."""
    text = "".join(map(chr, range(48, 124)))
    for given in (text, [text, text], [text, "hello"]):
        code, answer = embedder.ask("POST", "/v1/embeddings", {"input": given})
        says = "the prompt has 76 tokens, .* give truncate_prompt_tokens: -1 to leave out its end"
        assert (code, bool(re.search(says, answer["error"]["message"]))) == (400, True), answer
    body = {"model": "tiny", "input": [text, "hello"], "truncate_prompt_tokens": most}
    code, cut = embedder.ask("POST", "/v1/embeddings", body)
    assert (code, cut["usage"]["prompt_tokens"]) == (200, kept + min(5, kept))
    _, whole = embedder.ask("POST", "/v1/embeddings", {"input": [text[:kept], "hello"[:kept]]})
    for found, expected in zip(cut["data"], whole["data"], strict=True):
        assert found["embedding"] == pytest.approx(expected["embedding"], abs=1e-6)


@pytest.mark.parametrize("most", [0, -2, True, "1", 1.5])
def test_a_wrong_number_of_tokens_is_refused(embedder: Any, most: Any) -> None:
    body = {"input": "a", "truncate_prompt_tokens": most}
    code, answer = embedder.ask("POST", "/v1/embeddings", body)
    says = "truncate_prompt_tokens should"
    assert (code, answer["error"]["message"].startswith(says)) == (400, True), answer


def test_the_queue_is_bounded(encoder: Path, start: Any, until: Any) -> None:
    """What is beyond the bound is a 503; a client that leaves makes room for another."""
    llm = LLM(str(encoder), dtype="float32", device="cpu", max_num_seqs=2)
    held, release, answers = threading.Event(), threading.Event(), list[Any]()

    def hold(_: object) -> None:
        held.set()
        assert release.wait(60)

    def ask(*texts: str) -> None:
        answers.append(served.ask("POST", "/v1/embeddings", {"input": [*texts]}))

    with start(AsyncLLM(llm, max_waiting=1)) as served:
        threads = [threading.Thread(target=lambda: asyncio.run(served.llm.call(hold)))]
        threads[0].start()
        held.wait()
        try:
            threads.append(threading.Thread(target=ask, args=("a", "b")))
            threads[-1].start()
            until(lambda: served.llm._accepted == 2)
            ask("c", "d")  # three fit
            body = b'{"input": "c"}'
            head = (
                "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-two\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            with socket.create_connection(("127.0.0.1", served.port)) as leaves:
                leaves.sendall(head.encode() + body)
                until(lambda: served.llm._accepted == 3)
                ask("d")
            until(lambda: served.llm._accepted == 2)
            threads.append(threading.Thread(target=ask, args=("c",)))
            threads[-1].start()
            until(lambda: served.llm._accepted == 3)
            ask("a", "b", "c", "d")  # more than are ever accepted: trying again is of no use
        finally:
            release.set()
            for thread in threads:
                thread.join()
        assert not served.llm._accepted
    assert [code for code, _ in answers] == [503, 503, 400, 200, 200]
    assert {answer["error"]["code"] for _, answer in answers[:2]} == {"engine_overloaded"}
    assert {len(answer["data"]) for _, answer in answers[3:]} == {1, 2}


def test_each_model_refuses_what_it_is_not_for(
    embedder: Any, server: Any, start: Any, encoder: Path, tmp_path: Path
) -> None:
    """An encoder generates no text; a model of text, and one of classes, have no embeddings.

    The message names what a client of the server can do.
    """
    code, answer = embedder.ask("POST", "/v1/completions", {"prompt": "a"})
    assert (code, "text: /v1/embeddings returns" in answer["error"]["message"]) == (400, True)
    code, answer = server.ask("POST", "/v1/embeddings", {"input": "a"})
    says = "prompts: ask /v1/completions, or serve an encoder"
    assert (code, says in answer["error"]["message"]) == (400, True)
    shutil.copytree(encoder, tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(encoder)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with start(AsyncLLM(LLM(str(tmp_path), dtype="float32", device="cpu"))) as classifier:
        code, answer = classifier.ask("POST", "/v1/embeddings", {"input": "a"})
        assert (code, answer["error"]["message"].endswith("are no embeddings")) == (400, True)
    body = {"input": "a", "encoding_format": "int8"}
    code, answer = embedder.ask("POST", "/v1/embeddings", body)
    assert (code, answer["error"]["param"]) == (400, "encoding_format")


def test_tokens_and_back(server: Any, folder: Path) -> None:
    """Tokens of a text give the text again; messages are formatted by the template."""
    library = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    long = 'a "b" é ' * 20_000  # is checked, encoded and answered by other threads
    body = {"prompt": long, "return_token_strs": True}
    code, found = server.ask("POST", "/tokenize", body)
    assert (code, found["tokens"]) == (200, library.encode(long).ids)
    assert found["token_strs"] == library.encode(long).tokens
    some = found["tokens"][:50_000]  # of which a body may have 65,536
    code, found = server.ask("POST", "/detokenize", {"tokens": some})
    assert (code, found["prompt"]) == (200, library.decode(some))
    code, found = server.ask("POST", "/tokenize", {"prompt": "né", "return_token_strs": True})
    assert (code, found["count"], found["max_model_len"]) == (200, 3, 1024)
    assert found["token_strs"] == ["n", "Ã", "©"]
    assert server.ask("POST", "/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "né"}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.ask("POST", "/tokenize", {"messages": messages})[1]["tokens"]
    text = server.ask("POST", "/detokenize", {"tokens": tokens})[1]["prompt"]
    assert text == "<user>Hi\n<assistant>"
    for body in ({}, {"prompt": "a", "messages": messages}):
        assert server.ask("POST", "/tokenize", body)[0] == 400

"""What holds for any body of a request: an answer or a refusal in the shape of its protocol."""

from __future__ import annotations

import asyncio
import json
import runpy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/embeddings", "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/abort",
)  # fmt: skip
SECONDS = 60  # for one answer, of at most 64 tokens


def check_request(folder: Path, data: bytes) -> None:
    """Check ``data`` as a path, and the body after the end of its line."""
    first, _, body = data.partition(b"\n")
    path = first.decode(errors="replace")
    path = path if path in PATHS else PATHS[0]
    llm, application, loop = _server()
    status, kind, answer = loop.run_until_complete(
        asyncio.wait_for(_ask(application, path, body), SECONDS)
    )
    if kind.startswith("text/event-stream"):
        assert status == 200
        _check_events(path, answer.decode())
    elif status == 200:
        assert isinstance(_strict(answer), dict)
    else:
        _check_refusal(path, status, _strict(answer))
    assert not llm._accepted
    assert not llm.llm.engine.requests


@cache
def _server() -> tuple[Any, Any, Any]:
    """Return an engine, its application and an event loop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_module import AsyncLLM
    from vllm_module.server.app import application
    from vllm_module.server.connection import Limits
    from vllm_module.server.endpoint import Keys
    from vllm_module.server.state import State
    from vllm_module.server.tools import Formats

    server = runpy.run_path(str(Path(__file__).parents[1] / "server" / "conftest.py"))
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    checkpoint = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    server["write_tokenizer"](checkpoint)
    llm = AsyncLLM(server["load"](checkpoint, max_model_len=64, max_num_seqs=8))
    state = State(["tiny"], 16, llm, Formats("hermes", ("<think>", "</think>")))
    return llm, application(state, Keys([], ["key"]), Limits(1 << 20)), asyncio.new_event_loop()


async def _ask(application: Any, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Return the status, the type and the body of the answer to a client that waits for it."""
    received, sent = [{"type": "http.request", "body": body}], []

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    scope = {
        "type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"",
    }  # fmt: skip
    await application(scope, receive, send)
    answered = dict(sent[0]["headers"])
    content = b"".join(each.get("body", b"") for each in sent[1:])
    return sent[0]["status"], answered.get(b"content-type", b"").decode(), content


def _check_events(path: str, text: str) -> None:
    """Check that events are JSON, and that the last one ends the stream or is a refusal."""
    assert text.endswith("\n\n"), text[-100:]
    events = text[:-2].split("\n\n")
    data = [event.rpartition("data: ")[2] for event in events]
    if data[-1] == "[DONE]":
        del data[-1]
    values = [_strict(each.encode()) for each in data]
    for value in values:
        if "error" in value:
            _check_refusal(path, 400, value)
            assert value is values[-1]


def _check_refusal(path: str, status: int, value: Any) -> None:
    """Check the shape of OpenAI's errors, or Anthropic's."""
    error = value["error"]
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 4000
    assert 400 <= status < 500, (status, error)
    if path == "/v1/messages":
        assert value["type"] == "error"
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] != "server_error", error


def _strict(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)

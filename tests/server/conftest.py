"""A tiny checkpoint with a tokenizer of bytes and a chat template, and servers on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM
from vllm_module.server.app import application
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.listener import Address, Listener
from vllm_module.server.state import State

CLIENTS: list[openai.OpenAI] = []  # closed with their server
KEY, ADMIN = "sk-one-of-two", "sk-admin"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has one token for each byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("checkpoint")
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 1.0 if "norm" in name else 0.5)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Have PEFT save an adapter of the checkpoint."""
    import peft
    import torch

    path = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        tuned = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    tuned.save_pretrained(path)
    return path


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder), kv_cache_memory_bytes=4 << 20, dtype="float32", seed=None, device="cpu",
        **settings,
    )  # fmt: skip


@pytest.fixture(scope="session")
def sync(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


class Served(NamedTuple):
    """A server, and what tests look at behind it."""

    url: str
    state: State
    llm: Any  # an AsyncLLM
    listener: Listener

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)
        CLIENTS.append(client)
        return client

    def send(self, data: bytes, *, wait: bool = True) -> tuple[int, bytes]:
        """Send bytes over a socket; return the status and the body of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):  # it closed before it read everything
                while wait and (more := connection.recv(1 << 16)):
                    received += more
        head, _, body = received.partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head else 0), body

    def ask(
        self, method: str, path: str, body: object = None, key: str | None = KEY, **headers: str
    ) -> tuple[int, Any]:
        """Send one request on a connection of its own; return the status and the JSON answer."""
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
        kind = {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        headers = {**(kind if body is not None else {}), **headers}
        lines += [f"Authorization: Bearer {key}"] if key is not None else []
        lines += [f"{name}: {value}" for name, value in headers.items()]
        status, answer = self.send("\r\n".join([*lines, "", ""]).encode() + data)
        return status, json.loads(answer) if answer[:1] in b"{[" else answer


@contextlib.contextmanager
def serving(
    llm: AsyncLLM | None, address: Address | None = None, **options: Any
) -> Iterator[Served]:
    state = State(["tiny", "other-name"], options.pop("max_prompts", 64), llm)
    bounds = {name: options.pop(name) for name in Limits.__annotations__ if name in options}
    limits = Limits(**{"body_bytes": 4 << 20, **bounds})
    keys = Keys(options.pop("keys", [KEY, "sk-two"]), options.pop("admin", [ADMIN]))
    app = application(state, keys, limits)
    listener = Listener(app, address or Address(port=0), limits, **options)
    listener.start()
    try:
        yield Served(listener.url, state, llm, listener)
    finally:
        while CLIENTS:
            CLIENTS.pop().close()
        listener.stop()
        listener.stop()
        listener.join()
        if llm is not None:
            llm.close()


@pytest.fixture(scope="module")  # an event loop does not run on while other tests change clocks
def server(folder: Path) -> Iterator[Served]:
    with serving(AsyncLLM(load(folder, max_num_seqs=64), max_waiting=256)) as served:
        yield served


@pytest.fixture(scope="session")
def start() -> Callable[..., Any]:
    """Return the function that starts a server of a test's own."""
    return serving


@pytest.fixture(scope="session")
def engine(folder: Path) -> Callable[..., LLM]:
    """Return the function that loads an engine of a test's own."""
    return partial(load, folder)


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Return the function that waits until something holds."""

    def wait(holds: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.005)

    return wait

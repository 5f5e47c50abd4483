"""What operators and trainers ask: keys, health, metrics, pauses, weights."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load_file, save_file

from vllm_module import AsyncLLM
from vllm_module.base.version import __version__
from vllm_module.server.listener import Address
from vllm_module.weights import find_changes, write_update

ADMIN = "sk-admin"
LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 900}


def until(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def free(server: Any) -> bool:
    pool = server.llm.llm.engine.scheduler.pool
    return not server.llm.llm.engine.requests and pool.free_pages == pool.num_pages


def test_keys(server: Any) -> None:
    """Any of the keys, or the operators'; health needs none, and pausing the operators'."""
    status = {
        (path, key): server.ask(method, path, key=key)[0]
        for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/resume"))
        for key in ("sk-one-of-two", "sk-two", ADMIN, "sk-one-of-tw", "", None)
    }
    assert status == {
        **{("/health", key): 200 for _, key in status},
        **{
            ("/v1/models", key): 200 if key in ("sk-one-of-two", "sk-two", ADMIN) else 401
            for _, key in status
        },
        **{("/resume", key): 200 if key == ADMIN else 401 for _, key in status},
    }
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        server.client(key="wrong").models.list()
    code, answer = server.ask("POST", "/v1/completions", b"{broken", key="wrong")
    assert (code, answer["error"]["code"]) == (401, "invalid_api_key")
    message = server.ask("POST", "/resume", key="sk-two")[1]["error"]["message"]
    assert message.endswith("with an admin key, because this path is for operators")


def test_models_and_version(server: Any) -> None:
    """Each name is listed, and another one does not exist."""
    models = server.client().models.list().data
    assert [model.id for model in models] == ["tiny", "other-name"]
    assert models[0].model_dump()["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist: this is tiny"):
        server.client().completions.create(model="gpt", prompt="a")
    assert server.ask("GET", "/version") == (200, {"version": __version__})
    assert server.ask("GET", "/ready") == (200, {"status": "ready"})


def test_models_are_listed_during_a_step(server: Any) -> None:
    """A step, or an update, holds the engine's lock: the loop that answers all waits for none."""
    engine, held, release = server.llm.llm.engine, threading.Event(), threading.Event()

    def hold() -> None:
        with engine.alone():
            held.set()
            assert release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(5, release.set).start()
    assert server.ask("GET", "/v1/models")[0] == 200
    assert not release.is_set()
    release.set()
    thread.join()


def test_health_waits_for_no_update(server: Any) -> None:
    """Whoever watches the server would end it in the middle of a long one."""
    held, release = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        held.set()
        assert release.wait(60)

    thread = threading.Thread(target=lambda: asyncio.run(server.llm.call(hold)))
    thread.start()
    held.wait()
    threading.Timer(5, release.set).start()
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    assert not release.is_set()
    release.set()
    thread.join()
    assert server.ask("GET", "/health") == (200, {"status": "ok"})


def test_metrics(server: Any) -> None:
    """Counts grow by what a request has; histograms count it in every bucket above its time."""

    def read() -> dict[str, float]:
        text = server.ask("GET", "/metrics")[1].decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    server.ask("POST", "/v1/completions", {"prompt": "warm", "max_tokens": 1})
    before = read()
    body = {"prompt": "hello", "max_tokens": 7, "temperature": 0}
    assert server.ask("POST", "/v1/completions", body)[0] == 200
    after = read()
    label = '{model_name="tiny"}'
    grown = {name: after[name] - value for name, value in before.items()}
    assert grown[f"vllm:prompt_tokens_total{label}"] == 5
    assert grown[f"vllm:generation_tokens_total{label}"] == 7
    assert grown[f"vllm:time_to_first_token_seconds_count{label}"] == 1
    assert grown['vllm:e2e_request_latency_seconds_bucket{model_name="tiny",le="+Inf"}'] == 1
    assert after[f"vllm:num_requests_running{label}"] == 0
    sizes = 'model_name="tiny",num_gpu_blocks="2048",block_size="16"'  # pages of 2 KiB, in 4 MiB
    assert after[f"vllm:cache_config_info{{{sizes}}}"] == 1
    assert grown['vllm:request_success_total{model_name="tiny",finished_reason="length"}'] == 1


def test_pause_and_resume(server: Any) -> None:
    """While it is paused, a request waits and /ready is 503."""
    assert server.ask("POST", "/pause", {"mode": "wait"}, ADMIN) == (200, {"status": "paused"})
    assert server.ask("GET", "/ready")[0] == 503
    assert server.ask("GET", "/health")[0] == 200
    answers: list[Any] = []
    body = {"prompt": "a", "max_tokens": 2}
    thread = threading.Thread(
        target=lambda: answers.append(server.ask("POST", "/v1/completions", body))
    )
    thread.start()
    until(lambda: server.llm.llm.engine.requests)
    time.sleep(0.05)
    assert not answers
    assert server.ask("POST", "/resume", key=ADMIN) == (200, {"status": "resumed"})
    thread.join()
    assert answers[0][0] == 200
    assert server.ask("POST", "/pause", {"mode": "x"}, ADMIN)[0] == 400


def test_fields_of_operations_may_be_in_the_query(server: Any) -> None:
    """TRL, SkyRL and prime-rl send them so, and vLLM's server takes them."""
    stream = server.client().completions.create(
        model="tiny", prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    assert server.ask("POST", "/pause?mode=keep&clear_cache=false", key=ADMIN)[0] == 200
    assert server.llm.is_paused
    assert server.ask("POST", "/resume", key=ADMIN)[0] == 200
    *_, last = [first, *stream]
    assert last.choices[0].finish_reason == "length"  # the default mode would have ended it
    for path, body, said in (
        ("/pause?mode=x", None, "mode"),
        ("/pause?mod=keep", None, "no argument 'mod'"),
        ("/pause?clear_cache=1", None, "clear_cache"),
        ("/pause?mode=keep", {"mode": "wait"}, "send all fields in the body"),
    ):
        code, answer = server.ask("POST", path, body, ADMIN)
        assert (code, server.llm.is_paused) == (400, False)
        assert said in answer["error"]["message"]


def test_weights_change_over_http(server: Any, folder: Path, tmp_path: Path) -> None:
    """An update of some tensors changes the text, and back; a wrong one changes nothing."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 10}

    def text() -> str:
        found: str = server.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"]
        return found

    before = text()
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    for name, tensor in (("new", head.flip(0)), ("wrong", torch.zeros(3, 3))):
        (tmp_path / name).mkdir()
        save_file({"lm_head.weight": tensor.contiguous()}, tmp_path / name / "model.safetensors")
    given = {"path": str(tmp_path / "new"), "weight_version": "step-7"}
    assert server.ask("POST", "/update_weights", given)[0] == 401
    assert server.ask("POST", "/update_weights", given, ADMIN) == (
        200,
        {"weight_version": "step-7"},
    )
    assert text() != before
    assert server.ask("GET", "/weight_version")[1] == {"weight_version": "step-7"}
    code, answer = server.ask("POST", "/update_weights", {"path": str(tmp_path / "wrong")}, ADMIN)
    assert code == 400
    assert "lm_head.weight" in answer["error"]["message"]
    given = {"path": str(folder)}
    assert server.ask("POST", "/update_weights", given, ADMIN)[1] == {"weight_version": "step-7+1"}
    assert text() == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_say_which_weights_computed_their_tokens(
    server: Any, folder: Path, tmp_path: Path, path: str
) -> None:
    """A head of zeros gives only token 0, so tokens show their weights; the versions agree."""
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    save_file({"lm_head.weight": torch.zeros_like(head)}, tmp_path / "model.safetensors")
    assert server.ask("POST", "/update_weights", {"path": str(folder)}, ADMIN)[0] == 200
    held = server.ask("GET", "/weight_version")[1]["weight_version"]
    prompt: Any = {"prompt": "hello"}
    create = server.client().completions.create
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
        create = server.client().chat.completions.create
    body = {"model": "tiny", **prompt, "temperature": 0, "max_tokens": 400}
    extra = {"return_token_ids": True, "ignore_eos": True}
    ids, said = [], []
    for number, event in enumerate(create(stream=True, extra_body=extra, **body)):
        if number == 0:
            new = {"path": str(tmp_path), "weight_version": "zeros"}
            for operation, given in (
                ("pause", {"mode": "keep"}), ("update_weights", new), ("resume", {}),
            ):  # fmt: skip
                assert server.ask("POST", f"/{operation}", given, ADMIN)[0] == 200
        ids += getattr(event.choices[0], "token_ids", None) or []
        said += getattr(event.choices[0], "weight_versions", None) or []
    (first, before), (second, after) = said
    assert (first, second, before + after) == (held, "zeros", len(ids))
    assert min(before, after) > 0
    assert ids[before:] == [0] * after
    answer = server.ask("POST", path, {**body, "n": 2, "max_tokens": 3, "ignore_eos": True})[1]
    assert [each["weight_versions"] for each in answer["choices"]] == [[["zeros", 3]]] * 2
    assert server.ask("POST", "/update_weights", {"path": str(folder)}, ADMIN)[0] == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_an_answer_in_blocks_says_which_weights_computed_it(server: Any, path: str) -> None:
    """Whole, and in the last event of a stream; the counts are those of its usage."""
    given = {"role": "user", "content": "hello"}
    body = {"input": [given], "max_output_tokens": 5}
    if path == "/v1/messages":
        body = {"messages": [given], "max_tokens": 5}
    body |= {"model": "tiny", "temperature": 0}
    held = server.ask("GET", "/weight_version")[1]["weight_version"]
    code, answer = server.ask("POST", path, body)
    assert (code, answer["weight_versions"]) == (200, [[held, answer["usage"]["output_tokens"]]])
    _, stream = server.ask("POST", path, {**body, "stream": True})
    lines = [line for line in stream.decode().splitlines() if "weight_versions" in line]
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    (last,) = told
    within = last.get("response") or last["delta"]
    assert within["weight_versions"] == answer["weight_versions"]
    assert last["type"] in ("response.completed", "response.incomplete", "message_delta")


def test_an_update_in_a_file_over_http(server: Any, folder: Path, tmp_path: Path) -> None:
    """It brings its version, and is taken after the one that it changes, once if sent twice."""
    assert server.ask("POST", "/update_weights", {"path": str(folder)}, ADMIN)[0] == 200
    held = server.ask("GET", "/weight_version")[1]["weight_version"]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 10}
    before = server.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"]
    old = load_file(folder / "model.safetensors")["lm_head.weight"]
    path = tmp_path / "a.safetensors"
    changes = find_changes(old, old.flip(0).contiguous())
    write_update(path, {"lm_head.weight": changes}, version="a", after=held)
    given = {"path": str(path)}
    wrong = {**given, "weight_version": "b"}
    assert server.ask("POST", "/update_weights", wrong, ADMIN)[0] == 400
    assert server.ask("POST", "/update_weights", given, ADMIN) == (200, {"weight_version": "a"})
    assert server.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"] != before
    assert server.ask("POST", "/update_weights", wrong, ADMIN)[0] == 400
    changed = server.ask("POST", "/v1/completions", body)[1]["choices"]
    assert server.ask("POST", "/update_weights", given, ADMIN) == (200, {"weight_version": "a"})
    assert server.ask("POST", "/v1/completions", body)[1]["choices"] == changed
    assert server.ask("POST", "/sleep?level=2", key=ADMIN)[0] == 200  # which drops the weights
    code, answer = server.ask("POST", "/update_weights", given, ADMIN)
    assert (code, "or whole weights" in answer["error"]["message"]) == (400, True)
    assert server.ask("POST", "/update_weights", {"path": str(folder)}, ADMIN)[0] == 200
    write_update(path, {"lm_head.weight": changes}, version="c", after=held)
    code, answer = server.ask("POST", "/update_weights", given, ADMIN)
    assert (code, f"changes the weights {held!r}" in answer["error"]["message"]) == (400, True)
    assert server.ask("POST", "/update_weights", {"path": str(folder)}, ADMIN)[0] == 200
    assert server.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"] == before


def test_abort_by_id(server: Any) -> None:
    """The client of an aborted stream gets its end, with the reason."""
    stream = server.client().completions.create(model="tiny", stream=True, **LONG)
    first = next(stream)
    assert server.ask("POST", "/abort", {"request_id": first.id}, ADMIN)[0] == 200
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"
    assert free(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Any, stream: bool) -> None:
    """Closing the connection ends the request long before its last token."""
    before = server.llm.llm.engine.totals.generation_tokens
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-two\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: server.llm.llm.engine.requests)
    until(lambda: free(server))
    assert server.llm.llm.engine.totals.generation_tokens - before < 800


def test_the_queue_is_bounded(start: Any, engine: Any) -> None:
    """What is beyond the bound is a 503 with Retry-After, which OpenAI's client retries."""
    with start(AsyncLLM(engine(max_num_seqs=2), max_waiting=1)) as server:
        stream = server.client().completions.create(model="tiny", stream=True, n=2, **LONG)
        next(stream)
        code, answer = server.ask("POST", "/v1/completions", {"prompt": ["a", "b"]})
        assert (code, answer["error"]["code"]) == (503, "engine_overloaded")
        stream.close()


def test_loading(start: Any) -> None:
    """Before there is an engine, all but the version is 503; no admin key, no admin."""
    with start(None, admin=[]) as server:
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models")):
            code, answer = server.ask(method, path)
            assert (code, answer["error"]["code"]) == (503, "loading")
        assert server.ask("GET", "/version")[0] == 200
        code, answer = server.ask("POST", "/pause", {}, ADMIN)
        assert (code, answer["error"]["type"]) == (403, "permission_error")


def test_the_first_stop_waits_and_the_second_does_not(start: Any, engine: Any) -> None:
    """Between them a stream goes on, and nobody else is answered."""
    with start(AsyncLLM(engine())) as server:
        stream = server.client().completions.create(model="tiny", stream=True, n=60, **LONG)
        next(stream)
        server.listener.stop()
        until(lambda: not _answers(server.port))
        assert next(stream).choices
        server.listener.stop()
        with pytest.raises(openai.APIError, match="the server has stopped"):
            for _ in stream:
                pass
        until(lambda: free(server))


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_unix_socket_and_tls(start: Any, tmp_path: Path) -> None:
    """A socket that a killed server has left is replaced; another server's is not."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with start(None, Address(uds=path)) as server, socket.socket(socket.AF_UNIX) as client:
        assert server.url == f"http+unix://{path}"
        client.connect(str(path))
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in client.recv(1000)
        with pytest.raises(OSError, match="in use"):
            Address(uds=path).open()
    assert not path.exists()

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    trusted = ssl.create_default_context(cafile=str(files[0]))
    address = Address(port=0, ssl_certfile=files[0], ssl_keyfile=files[1])
    with start(None, address) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        with urllib.request.urlopen(f"{url}/version", context=trusted) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_event_waits_until_the_one_before_is_confirmed(host: str) -> None:
    """Nagle's algorithm is off for connections that are accepted, not only for the socket."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    with (
        Address(host=host, port=0).open() as listening,
        socket.create_connection(listening.getsockname()[:2]),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_vllms_clients_read(server: Any) -> None:
    assert server.ask("GET", "/get_world_size")[1] == {"world_size": 1}
    info = server.ask("GET", "/server_info?config_format=json")[1]["vllm_config"]
    assert info["model_config"]["max_model_len"] == server.llm.llm.model_config.max_model_len
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["parallel_config"] == {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
    }  # fmt: skip
    assert server.ask("POST", "/reset_prefix_cache", b"")[0] == 401
    text = "a prompt that is longer than one page of the cache"
    for cached in (False, True):
        body = {"prompt": text, "max_tokens": 1}
        usage = server.ask("POST", "/v1/completions", body)[1]["usage"]
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == cached
    assert server.ask("POST", "/reset_prefix_cache", b"", ADMIN) == (200, {"success": True})
    usage = server.ask("POST", "/v1/completions", body)[1]["usage"]
    assert not usage["prompt_tokens_details"]["cached_tokens"]

"""Engines that load from an engine: what they are given, at what cost, and what is refused."""

from __future__ import annotations

import http.client
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, DeviceConfig, ModelConfig, SamplingParams, get_model
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightReadError
from vllm_module.export.sharded_state import shard
from vllm_module.runtime import held_file, replica
from vllm_module.weights.source import find_source
from vllm_module.weights.stores import store, stored_bytes

TOKEN = "a-token-of-a-test"
_SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "layer_types": ["sliding_attention"] * 2,
    },
    "gpt_neox": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", TOKEN)
    monkeypatch.setattr(store, "_FIRST_DELAY", 1e-6)
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, entries in FAMILIES.items():
        config = AutoConfig.for_model(kind, **({} if kind == "gpt2" else _SIZES) | entries)
        torch.manual_seed(0)
        made[kind] = tmp_path_factory.mktemp("replica") / kind
        AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
    return made


def engine(model: object, **options: Any) -> LLM:
    return LLM(
        str(model), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=4,
        kv_cache_memory_bytes=1 << 20, max_model_len=32, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def serving(folders: dict[str, Path]) -> Iterator[tuple[LLM, Any]]:
    """An engine on two ranks, and its server."""
    with (
        engine(folders["llama"], tensor_parallel_size=2) as llm,
        llm.serve_weights(token=TOKEN) as server,
    ):
        yield llm, server


def loaded(model: object, rank: int = 0, size: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    with tensor_parallel(rank=rank, size=size):
        built = get_model(
            model_config=ModelConfig(model=str(model), dtype="float32", **options),
            device_config=DeviceConfig(device="cpu"),
        )
    return dict(built.named_parameters())


@contextmanager
def opened(url: str) -> Iterator[Any]:
    source = find_source(url)
    with closing(source.weights()) as checkpoint:  # type: ignore[type-var]
        yield checkpoint


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_rank_gets_the_bits_of_the_checkpoint(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused, transposed, interleaved, tied, and experts, whatever pieces are taken."""
    for module in (replica, held_file):
        monkeypatch.setattr(module, "PIECE", 777)
    folder = folders[kind]
    with engine(folder) as llm, llm.serve_weights(token=TOKEN) as server:
        assert server.url.startswith("replica://127.0.0.1:")
        for rank, size in ((0, 1), (1, 2)):
            assert same(loaded(server.url, rank, size), loaded(folder, rank, size))


def test_an_engine_of_two_ranks_serves_one_of_another_number(
    folders: dict[str, Path], serving: tuple[LLM, Any]
) -> None:
    """Tokens are those of an engine of the folder, and the one that serves goes on."""
    llm, server = serving
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [9]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(of: LLM) -> list[list[int]]:
        return [x.outputs[0].token_ids for x in of.generate(prompts, params, use_tqdm=False)]

    with engine(folders["llama"]) as alone:
        expected, digest = tokens(alone), alone.digest().hex
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tokens(llm)))
    thread.start()  # while another loads
    with engine(server.url) as other:
        assert tokens(other) == expected
        assert other.digest().hex == llm.digest().hex == digest
    thread.join()
    assert found == [expected]


def test_entries_that_replace_those_of_a_file_are_served(folders: dict[str, Path]) -> None:
    """Who reads computes what the engine does; its own entries replace those."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    prompt: Any = {"prompt_token_ids": [1, 2, 3, 7, 11]}

    def computed(of: LLM) -> float | None:
        return of.generate([prompt], params, use_tqdm=False)[0].outputs[0].cumulative_logprob

    own = {"rms_norm_eps": 0.5, "hidden_act": "gelu"}
    with engine(folders["llama"]) as plain, engine(folders["llama"], hf_overrides=own) as llm:
        expected = computed(llm)
        assert expected != computed(plain)
        with llm.serve_weights(token=TOKEN) as server:
            with engine(server.url) as other:
                assert computed(other) == expected
            back = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
            with engine(server.url, hf_overrides=back) as other:
                assert computed(other) == computed(plain)


@pytest.fixture(scope="module")
def quantizable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows hold whole scale groups on two ranks, too."""
    entries = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        request.param, **_SIZES | FAMILIES[request.param] | entries | {"tie_word_embeddings": False}
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("quantizable")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# Each scheme is tried on one rank and on two, and of either family.
@pytest.mark.parametrize(
    ("quantizable", "scheme", "dtype", "ranks"),
    [
        ("llama", "fp8", torch.float8_e4m3fn, 1),
        ("llama", "int4_per_group", torch.int32, 2),
        ("mixtral", "fp8", torch.float8_e4m3fn, 2),
        ("mixtral", "int4_per_group", torch.int32, 1),
    ],
    indirect=["quantizable"],
)
def test_a_reader_quantizes_what_it_gets(
    quantizable: Path, scheme: str, dtype: torch.dtype, ranks: int
) -> None:
    """Values and scales are those of a load from the folder, whatever ranks serve the weights."""
    with engine(quantizable, quantization=scheme) as llm:
        expected = llm.digest()
        first = (
            r"layers\.0\.self_attn\.qkv_proj( is|\.weight\S* is) quantized, and an engine serves"
        )
        with pytest.raises(UnsupportedModelError, match=first):
            llm.serve_weights(token=TOKEN)
    with (
        engine(quantizable, tensor_parallel_size=ranks) as llm,
        llm.serve_weights(token=TOKEN) as server,
    ):
        with engine(server.url, quantization=scheme) as other:
            assert other.digest().tensors == expected.tensors  # with the scales
            assert other.digest().hex == expected.hex != llm.digest().hex
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            found = loaded(server.url, rank, size, quantization=scheme)
            assert dtype in {tensor.dtype for tensor in found.values()}
            assert same(found, loaded(quantizable, rank, size, quantization=scheme))


def test_a_rank_asks_for_what_it_keeps(folders: dict[str, Path], serving: tuple[LLM, Any]) -> None:
    """The names, shapes and dtypes are those of the files; rows of a rank are all that is read."""
    _, server = serving
    stored = load_file(folders["llama"] / "model.safetensors")
    with opened(server.url) as checkpoint:
        assert {name: (w.shape, w.dtype) for name, w in checkpoint.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()
        }
        name = "model.layers.1.mlp.up_proj.weight"
        before = checkpoint.bytes_read
        part = checkpoint[name].narrow(0, 24, 24).read()
        assert torch.equal(part, stored[name][24:])
        assert checkpoint.bytes_read - before == part.nbytes


def test_a_rank_sends_no_more_than_what_is_asked_for(folders: dict[str, Path]) -> None:
    """Pickle sends all of a tensor's memory: a row of a parameter has a memory of its own."""
    for kind in ("llama", "gpt2"):  # gpt2's are transposed
        model = get_model(
            model_config=ModelConfig(model=str(folders[kind]), dtype="float32"),
            device_config=DeviceConfig(device="cpu"),
        )
        for name in load_file(folders[kind] / "model.safetensors"):
            if name in model.expected_weights():
                for _, _, part in held_file._take(model, name, 0, 1, copy=True):
                    assert part.untyped_storage().nbytes() == part.nbytes, name


@pytest.mark.parametrize("version", [None, "0"], ids=["counted", "the same name"])
def test_an_update_in_the_middle_ends_the_load(
    folders: dict[str, Path], version: str | None
) -> None:
    """No mixture of versions is loaded: the reader says that the file has changed."""
    with engine(folders["llama"]) as llm, llm.serve_weights(token=TOKEN) as server:
        with opened(server.url) as checkpoint:
            name = "model.norm.weight"
            first = checkpoint[name].read()
            llm.update_weights({name: torch.full_like(first, 2.0)}, weight_version=version)
            with pytest.raises(Exception, match="changed"):
                checkpoint["model.embed_tokens.weight"].read()
        assert (loaded(server.url)[name] == 2).all()
        llm.sleep(level=2)
        with pytest.raises(WeightReadError, match=r"409 .*engine sleeps"):
            loaded(server.url)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.at_length)])
def test_an_answer_across_an_update_is_cut_off(
    folders: dict[str, Path], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the weights change, nobody gets the last bytes; a failed update is not served."""
    for module in (replica, held_file):
        monkeypatch.setattr(module, "PIECE", 512)
    monkeypatch.setattr(replica, "_LAST", 256)
    name = "model.norm.weight"
    with (
        engine(folders["llama"], tensor_parallel_size=size) as llm,
        llm.serve_weights(token=TOKEN) as server,
    ):
        end = server.size_of("model.safetensors")
        whole = b"".join(server.pieces("model.safetensors", 0, end, server.tag()))
        assert len(whole) == end
        count = sum(1 for _ in server.pieces("model.safetensors", 0, end, server.tag()))
        # The last version has the name of the one before.
        for taken, version in ((1, None), (count // 2, "a"), (count - 1, None), (count - 1, "a+1")):
            pieces = server.pieces("model.safetensors", 0, end, server.tag())
            for _ in range(taken):
                next(pieces)
            llm.update_weights({name: torch.full((32,), 2.0 + taken)}, weight_version=version)
            with pytest.raises(ConnectionError, match="have changed"):
                list(pieces)
        broken = iter([(name, torch.ones(32)), (name, torch.ones(32))])
        with pytest.raises(ValueError, match="already filled"):
            llm.update_weights(broken)
        with pytest.raises(WeightReadError, match=r"409 .*broke midway"):
            loaded(server.url)


@pytest.mark.parametrize("kind", ["phi3", pytest.param("gpt_oss", marks=pytest.mark.at_length)])
def test_a_tensor_that_was_sent_before_is_sent_as_it_is_now(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is the last that is read before an update of it, and the first after that."""
    monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", 512)  # as if the file were a large model's
    with engine(folders[kind]) as llm, llm.serve_weights(token=TOKEN) as server:
        with opened(server.url) as checkpoint:
            before = {name: handle.read() for name, handle in checkpoint.items()}
        for name, tensor in before.items():
            for expected in (tensor + 1, tensor + 2):
                llm.update_weights({name: expected})
                with opened(server.url) as checkpoint:
                    assert torch.equal(checkpoint[name].read(), expected), name


def test_without_the_token_there_is_nothing(
    serving: tuple[LLM, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to set; paths lead nowhere, and methods are refused."""
    _, server = serving
    for token in ("", "wrong", TOKEN + "x"):
        monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", token)
        with pytest.raises(CheckpointFormatError, match="VLLM_MODULE_REPLICA_TOKEN") as refused:
            loaded(server.url)
        assert TOKEN not in str(refused.value)
    address = server.url.replace("replica", "http")
    for path in ("/../config.json", "//etc/passwd", "/config.json/", "/?x", "/model"):
        request = urllib.request.Request(
            address + path, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(request)
        with missing.value as answer:
            assert answer.code == 404
    size = server.size_of("config.json")
    last = urllib.request.Request(
        f"{address}/config.json",
        headers={"Authorization": f"Bearer {TOKEN}", "Range": f"bytes={size - 1}-{size + 8}"},
    )
    with urllib.request.urlopen(last) as answer:  # RFC 9110, section 14.4: cut to what is there
        assert answer.headers["Content-Range"] == f"bytes {size - 1}-{size - 1}/{size}"
        assert answer.read() == b"\n"
    odd = "bytes=5-2", "bytes=-5", "bytes=99999999999999-", "lines=1-2", "bytes=0-1,3-4"
    for wanted in (*odd, f"bytes={size}-{size}"):
        headers = {"Authorization": f"Bearer {TOKEN}", "Range": wanted}
        request = urllib.request.Request(f"{address}/config.json", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as unsatisfied:
            urllib.request.urlopen(request)
        with unsatisfied.value as answer:
            assert answer.code == 416


def test_clients_beyond_the_limit_are_cut_off(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that send nothing hold no more than their places, and a close waits for none."""
    monkeypatch.setattr(replica, "_CLIENTS", 3)
    with engine(folders["llama"]) as llm, llm.serve_weights(token=TOKEN) as server:
        host, port = server.url.removeprefix("replica://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(3)]
        for each in silent:  # has been accepted once it is answered
            each.sendall(b"GET /config.json HTTP/1.1\r\n\r\n")
            assert each.recv(12) == b"HTTP/1.1 401"
        with socket.create_connection((host, int(port))) as other:
            assert other.recv(1) == b"", "the fourth is closed"
        silent.pop().close()
        while True:  # until the server has seen it
            try:
                assert loaded(server.url).keys()
                break
            except (CheckpointFormatError, WeightReadError):
                continue
    for each in silent:
        each.close()


def test_clients_take_turns_where_they_are_too_many(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that others keep, such as those of other ranks, do not keep a rank out."""
    monkeypatch.setattr(replica, "_CLIENTS", 2)  # not 64 connections, so that few are too many

    def ask(connection: http.client.HTTPConnection) -> bool:
        """Return whether the server keeps the connection."""
        connection.request("GET", "/config.json", headers={"Authorization": f"Bearer {TOKEN}"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            assert answer.read()
            return not answer.will_close

    with engine(folders["llama"]) as llm, llm.serve_weights(token=TOKEN) as server:
        first, second, third = (
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(3)
        )
        with closing(first), closing(second), closing(third):
            assert ask(first)
            assert ask(second)
            with pytest.raises(ConnectionError):
                ask(third)
            assert not ask(first)
            while True:  # until the server has seen that the first is closed
                third.close()
                try:
                    assert not ask(third)
                    break
                except ConnectionError:
                    continue


def test_digests_of_the_files_are_not_served(folders: dict[str, Path], tmp_path: Path) -> None:
    """An update makes them those of other weights."""
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    (folder / "digests.json").write_text("{}")
    served = replica.small_files(folder)
    assert served["config.json"]
    assert "digests.json" not in served


def test_an_engine_of_a_sharded_state_is_served_as_one_file(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its manifest lists files of ranks, which another engine would look for."""
    shard(ModelConfig(model=str(folders["llama"]), dtype="float32"), 1, tmp_path / "sharded")
    with engine(tmp_path / "sharded") as llm, llm.serve_weights(token=TOKEN) as server:
        for rank in range(2):
            expected = loaded(folders["llama"], rank, 2)
            assert same(loaded(server.url, rank, 2), expected)


def test_what_cannot_be_served_is_refused(folders: dict[str, Path]) -> None:
    with engine(folders["llama"], quantization="int8_per_channel_weight_only") as llm:
        with pytest.raises(UnsupportedModelError, match="is quantized"):
            llm.serve_weights()
        llm.sleep(level=1)
    with engine(folders["llama"]) as llm:
        for token in ("short", "new\nline-of-token", "größer-als-acht"):
            with pytest.raises(ValueError, match="token should be eight"):
                llm.serve_weights(token=token)
        with llm.serve_weights() as one, llm.serve_weights() as other:
            assert one.token != other.token
            assert one.tag() != other.tag()  # one may come after another, of other weights


def test_a_token_has_eight_characters(serving: tuple[LLM, Any]) -> None:
    """Seven are refused, and eight are what clients have to know."""
    llm, _ = serving
    with pytest.raises(ValueError, match="eight printable"):
        llm.serve_weights(token="1234567")
    with llm.serve_weights(token="12345678") as server:
        assert server.token == "12345678"

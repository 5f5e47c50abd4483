"""Mistral's own files: the same model as Hugging Face's files of it, at every size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

from vllm_module import LLM, LoadConfig, ModelConfig, SamplingParams, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import (
    CheckpointFormatError,
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights import open_checkpoint
from vllm_module.weights.checkpoint import LocalFiles
from vllm_module.weights.mistral import mistral_small_files, renamed

HEADS, KV_HEADS, HEAD = 4, 2, 8
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "dim": 16, "n_layers": 2, "head_dim": HEAD, "hidden_dim": 24, "n_heads": HEADS,
    "n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "mlp": "feed_forward",
    "block_sparse_moe": "feed_forward",
}  # fmt: skip


def theirs(name: str) -> str:
    """Return Mistral's name of a tensor."""
    stem, _, last = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{last}"
    _, _, number, inside = stem.split(".", 3)
    for begin, new in NAMES.items():
        if inside == begin or inside.startswith(f"{begin}."):
            return f"layers.{number}.{new}{inside[len(begin) :]}.{last}"
    raise KeyError(name)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the halves of each head in turns, as Mistral stores them."""
    halves = weight.view(heads, 2, HEAD // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def published(folder: Path, model: Any, params: dict[str, Any]) -> Path:
    """Write ``hf`` and ``own`` below ``folder``: the model in both layouts."""
    model.eval().save_pretrained(folder / "hf")
    tensors = {}
    for name, tensor in load_file(folder / "hf" / "model.safetensors").items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        tensors[theirs(name)] = tensor if heads is None else interleaved(tensor, heads)
    own = folder / "own"
    own.mkdir()
    save_file(tensors, own / "consolidated.safetensors")
    (own / "params.json").write_text(json.dumps(params))
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE))
    return published(tmp_path_factory.mktemp("mistral"), model, PARAMS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, **experts))
    params = PARAMS | {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}
    return published(tmp_path_factory.mktemp("mixtral"), model, params)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_parameters_are_those_of_the_same_model_in_hugging_faces_files(
    request: pytest.FixtureRequest, kind: str, size: int
) -> None:
    """Each rank holds the same bits, whichever of the two layouts it reads."""
    folder = request.getfixturevalue(kind)
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            own, hf = (
                get_model(model_config=ModelConfig(model=str(folder / each), dtype="float32"))
                for each in ("own", "hf")
            )
        assert type(own) is type(hf)
        for (name, one), (_, other) in zip(
            own.named_parameters(), hf.named_parameters(), strict=True
        ):
            assert torch.equal(one, other), name


def test_the_engine_gives_the_same_tokens(dense: Path) -> None:
    """From params.json alone, and from a config.json beside it, with both layouts in a folder."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    both = dense / "both"
    both.mkdir()
    for folder in ("hf", "own"):
        for file in (dense / folder).iterdir():
            (both / file.name).write_bytes(file.read_bytes())
    outputs = []
    for folder, load_format in (("hf", "auto"), ("own", "auto"), ("both", "mistral")):
        small: dict[str, Any] = {"max_model_len": 32, "kv_cache_memory_bytes": 1 << 20}
        with LLM(dense / folder, dtype="float32", load_format=load_format, **small) as llm:
            prompt = {"prompt_token_ids": [5, 9, 13, 2, 40]}
            outputs.append(llm.generate(prompt, params, False)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("entries", "static"),
    [
        ({"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}, True),
        ({"qformat_weight": "fp8_e4m3"}, True),
        ({"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}, False),
    ],
)
def test_fp8_files_hold_what_hugging_faces_hold(
    dense: Path, tmp_path: Path, entries: dict[str, str], static: bool, size: int
) -> None:
    """FP8 weights and scales are the same bits from both layouts."""
    hf, own = tmp_path / "hf", tmp_path / "own"
    tensors: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(load_file(dense / "hf/model.safetensors").items()):
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        scale = torch.tensor(0.01 + index / 1000)  # another one of each tensor
        tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale"] = scale
        if static:
            tensors[name.removesuffix("weight") + "input_scale"] = scale * 3
    for folder in (hf, own):
        folder.mkdir()
    save_file(tensors, hf / "model.safetensors")
    config = json.loads((dense / "hf/config.json").read_text())
    scheme = "static" if static else "dynamic"
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    (hf / "config.json").write_text(json.dumps(config))
    own_tensors = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        last = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}.get(last, last)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(stem.split(".")[-1])
        rows = interleaved(tensor, heads) if heads and tensor.dim() else tensor
        own_tensors[theirs(f"{stem}.weight").removesuffix("weight") + last] = rows
    save_file(own_tensors, own / "consolidated.safetensors")
    (own / "params.json").write_text(json.dumps(PARAMS | {"quantization": entries}))
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            models = [
                get_model(model_config=ModelConfig(model=str(folder), dtype="bfloat16"))
                for folder in (own, hf)
            ]
        ours, expected = (dict(model.named_parameters()) for model in models)
        assert ours.keys() == expected.keys()
        assert any(name.endswith("input_scale") for name in ours) == static
        for name, tensor in expected.items():
            bits = (x.contiguous().view(torch.uint8) for x in (ours[name], tensor))
            assert torch.equal(*bits), name


def test_quantization_of_compressed_tensors_is_passed_on(dense: Path, tmp_path: Path) -> None:
    """Its entry stands in params.json as it stands in config.json, under either spelling."""
    for index, method in enumerate(("compressed-tensors", "compressed_tensors")):
        folder = tmp_path / str(index)
        folder.mkdir()
        weights = (dense / "own" / "consolidated.safetensors").read_bytes()
        (folder / "consolidated.safetensors").write_bytes(weights)
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float",
                 "strategy": "tensor", "symmetric": True, "dynamic": False}}  # fmt: skip
        entries = {"quant_method": method, "format": "float-quantized",
                   "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip
        (folder / "params.json").write_text(json.dumps(PARAMS | {"quantization": entries}))
        with pytest.raises(
            WeightLoadError, match=r"weight_scale"
        ):  # the weights here are not quantized
            get_model(model_config=ModelConfig(model=str(folder)))


# transformers' convert_mistral_weights_to_hf.py, and vLLM's transformers_utils/configs/mistral.py.
RENAMED = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "layers.0.attention.wq": "model.layers.0.self_attn.q_proj_pairs",
    "layers.0.attention.wk": "model.layers.0.self_attn.k_proj_pairs",
    "layers.0.attention.wv": "model.layers.0.self_attn.v_proj",
    "layers.0.attention.wo": "model.layers.0.self_attn.o_proj",
    "layers.0.attention_norm": "model.layers.0.input_layernorm",
    "layers.10.ffn_norm": "model.layers.10.post_attention_layernorm",
    "layers.0.feed_forward.w1": "model.layers.0.mlp.gate_proj",
    "layers.0.feed_forward.w2": "model.layers.0.mlp.down_proj",
    "layers.0.feed_forward.w3": "model.layers.0.mlp.up_proj",
    "layers.0.feed_forward.gate": "model.layers.0.block_sparse_moe.gate",
    "layers.0.block_sparse_moe.gate": "model.layers.0.block_sparse_moe.gate",
    **{
        f"layers.3.{stem}.experts.12.{w}": f"model.layers.3.block_sparse_moe.experts.12.{w}"
        for stem in ("feed_forward", "block_sparse_moe") for w in ("w1", "w2", "w3")
    },
}  # fmt: skip
UNKNOWN = (
    "vision_encoder.w", "layers", "layers.0", "layers.0.w", "layer.0.attention.wq", "x.norm",
    "layers.0.feed_forward.experts.1", "layers.0.feed_forward.experts.1.w1.x", "norm.x",
    "layers.0.attention.experts.1.w1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("last", "new"),
    [("weight", "weight"), ("qscale_weight", "weight_scale"), ("qscale_act", "input_scale")],
)
def test_every_name_is_the_one_of_hugging_faces_files(last: str, new: str) -> None:
    """Names are written out; what is none of them stays as it is, and is refused by the model."""
    for name, expected in RENAMED.items():
        assert renamed(f"{name}.{last}") == f"{expected}.{new}"
    for name in UNKNOWN:
        assert renamed(f"{name}.{last}") == f"{name}.{last}"


ABSENT = object()
ENTRIES: list[tuple[str, Any, str, Any]] = [
    # Entry of params.json and its value; the entry of config.json and its value, or a refusal.
    *[(name, 48, new, 48) for name, new in (
        ("dim", "hidden_size"), ("n_layers", "num_hidden_layers"), ("head_dim", "head_dim"),
        ("n_heads", "num_attention_heads"), ("n_kv_heads", "num_key_value_heads"),
        ("hidden_dim", "intermediate_size"), ("vocab_size", "vocab_size"),
        ("sliding_window", "sliding_window"), ("max_seq_len", "max_position_embeddings"),
    )],
    ("norm_eps", 2e-5, "rms_norm_eps", 2e-5),
    ("rope_theta", 1e6, "rope_theta", 1e6),
    ("tied_embeddings", True, "tie_word_embeddings", True),
    ("tied_embeddings", False, "tie_word_embeddings", False),
    ("tied_embeddings", None, "tie_word_embeddings", ABSENT),
    ("sliding_window", None, "sliding_window", None),
    ("sliding_window", ABSENT, "sliding_window", None),
    # https://github.com/mistralai/mistral-inference, transformer.py: 1e6 unless there is a window
    # (Mixtral 8x7B and Mistral 7B v0.1 have no entry, and were trained with 1e6 and 1e4).
    ("rope_theta", None, "rope_theta", 1e6),
    ("rope_theta", ABSENT, "rope_theta", 1e6),
    ("n_kv_heads", ABSENT, "num_key_value_heads", ABSENT),
    ("head_dim", ABSENT, "head_dim", ABSENT),
    *[(name, ABSENT, "", f"has no {name}") for name in (
        "dim", "n_layers", "n_heads", "hidden_dim", "norm_eps", "vocab_size",
    )],
    ("dim", 16, "hidden_act", "silu"),
    ("dim", 16, "architectures", ["MistralForCausalLM"]),
    ("moe", None, "architectures", ["MistralForCausalLM"]),
    ("moe", {"num_experts": 4, "num_experts_per_tok": 3}, "num_local_experts", 4),
    ("moe", {"num_experts": 4, "num_experts_per_tok": 3}, "num_experts_per_tok", 3),
    ("moe", {"num_experts": 4, "num_experts_per_tok": 3}, "architectures", ["MixtralForCausalLM"]),
    ("moe", {"num_experts": 4, "num_experts_per_tok": 3}, "model_type", "mixtral"),
    # What a trainer wrote, and entries that are switched off, change nothing.
    *[(name, value, "model_type", "mistral") for name, value in (
        ("model_type", "transformer"), ("use_biases", False), ("causal", True), ("causal", False),
        ("max_batch_size", 3), ("dtype", "bfloat16"), ("lora", None), ("x", False), ("x", {}),
        ("x", []), ("quantization", None), ("quantization", {}),
    )],
    *[("x", value, "", "'x' is") for value in (1, "", True, {"a": 1}, [0])],
    ("use_biases", True, "", "use_biases is set"),
    ("quantization", {"qformat_weight": "fp8_e4m3"}, "quantization_config",
     {"quant_method": "fp8", "activation_scheme": "static"}),
    ("quantization", {"qscheme_act": "TENSOR"}, "", "quantization should have qformat_weight"),
    ("quantization", "fp8", "", "quantization should have qformat_weight"),
    ("quantization", {"quant_method": "Compressed_Tensors", "x": 1}, "quantization_config",
     {"quant_method": "compressed-tensors", "x": 1}),
    ("quantization", {"quant_method": "awq"}, "", "got {'quant_method': 'awq'}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "new", "expected"), ENTRIES)
def test_every_entry_of_params_is_the_one_of_config(
    tmp_path: Path, name: str, value: Any, new: str, expected: Any
) -> None:
    """Entries are written out; the rows of queries and keys are known to be in another order."""
    given = {key: each for key, each in {**PARAMS, name: value}.items() if each is not ABSENT}
    (tmp_path / "params.json").write_text(json.dumps(given))
    if not new:
        with pytest.raises((CheckpointFormatError, UnsupportedModelError)) as error:
            mistral_small_files(LocalFiles(tmp_path))
        assert expected in str(error.value)
        return
    made = json.loads(mistral_small_files(LocalFiles(tmp_path))["config.json"])
    assert made.get(new, ABSENT) == expected
    assert made["stored_rotary_pairs"] is True


def test_an_old_model_with_a_window_rotates_by_its_base(tmp_path: Path) -> None:
    """Mistral 7B v0.1 has a window and no ``rope_theta``; its base is 10,000."""
    given = {name: each for name, each in PARAMS.items() if name != "rope_theta"}
    (tmp_path / "params.json").write_text(json.dumps({**given, "sliding_window": 4096}))
    made = json.loads(mistral_small_files(LocalFiles(tmp_path))["config.json"])
    assert made["rope_theta"] == 1e4


def test_files_beside_the_weights_are_taken(tmp_path: Path) -> None:
    """config.json goes before params.json; each file of a tokenizer is handed on as it is."""
    (tmp_path / "params.json").write_text("damaged")
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    names = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "generation_config.json",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "notes.txt").touch()
    files = mistral_small_files(LocalFiles(tmp_path))
    assert json.loads(files.pop("config.json")) == {"hidden_size": 7, "stored_rotary_pairs": True}
    assert files == {name: name.encode() for name in names}


@pytest.mark.parametrize(
    ("positions", "length", "expected"),
    [
        (None, None, 128_000),
        (64, None, 64),
        (None, 32, 32),
        (64, 32, 32),
        (32, 64, 32),
        (0, 64, None),
        (64, 0, None),
        ("64", 64, None),
    ],
)
def test_the_longest_sequence_is_the_one_of_vllm(
    tmp_path: Path, positions: Any, length: Any, expected: int | None
) -> None:
    """Of ``max_position_embeddings`` and ``max_seq_len``, vLLM's engine takes the smaller one."""
    params = {name: value for name, value in PARAMS.items() if name != "max_position_embeddings"}
    params |= {"max_position_embeddings": positions, "max_seq_len": length}
    (tmp_path / "params.json").write_text(json.dumps(params))
    if expected is None:
        with pytest.raises(CheckpointFormatError, match="max_position_embeddings"):
            ModelSource.find(ModelConfig(model=str(tmp_path)), "dummy")
        return
    source = ModelSource.find(ModelConfig(model=str(tmp_path)), "dummy")
    assert source.config.max_position_embeddings == expected


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"yarn": {"factor": 8}}, UnsupportedModelError, "'yarn' is .*, which no model here knows"),
        ({"q_lora_rank": 64}, UnsupportedModelError, "'q_lora_rank' is 64"),
        ({"use_biases": True}, UnsupportedModelError, "use_biases is set"),
        ({"quantization": {"qformat_weight": "int4"}}, UnsupportedModelError, "fp8_e4m3 with"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "CHANNEL"}},
            UnsupportedModelError,
            "qscheme_act TENSOR, NO_SCALES or none, .* got .*CHANNEL",
        ),
        ({"dim": None}, CheckpointFormatError, "hidden_size"),
        ({"n_kv_heads": 3}, ShardingError, "3 key-value heads"),
    ],
)
def test_settings_that_no_model_has_are_refused(
    dense: Path, tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """The entry and its value are named, before a weight is read."""
    weights = (dense / "own" / "consolidated.safetensors").read_bytes()
    (tmp_path / "consolidated.safetensors").write_bytes(weights)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | change))
    with pytest.raises(kind, match=message):
        get_model(model_config=ModelConfig(model=str(tmp_path)))


def test_files_that_do_not_fit_are_refused(dense: Path, tmp_path: Path) -> None:
    """A missing entry, no files, and an index that names a file that is not there."""
    (tmp_path / "params.json").write_text(json.dumps({"dim": 16}))
    with pytest.raises(CheckpointFormatError, match=r"params.json has no n_layers"):
        get_model(model_config=ModelConfig(model=str(tmp_path)))
    with pytest.raises(CheckpointFormatError, match=r"no consolidated\*.safetensors"):
        open_checkpoint(tmp_path, "mistral")
    names = load_file(dense / "own" / "consolidated.safetensors")
    weight_map = dict.fromkeys(names, "consolidated-00001-of-00002.safetensors")
    index = tmp_path / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointFormatError, match=r"00001-of-00002.safetensors, which is not"):
        open_checkpoint(tmp_path, "mistral")
    save_file(names, tmp_path / "consolidated-00001-of-00002.safetensors")
    with open_checkpoint(tmp_path, "mistral") as checkpoint:
        assert len(checkpoint) == len(names)
    loading = LoadConfig(load_format="mistral")
    with pytest.raises(CheckpointFormatError, match="'mistral', but of 'safetensors'"):
        get_model(model_config=ModelConfig(model=str(dense / "hf")), load_config=loading)


def test_what_is_there_instead_of_the_files_is_named(tmp_path: Path) -> None:
    """Meta's files have params.json too, and are in no format that is read."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(CheckpointFormatError, match=r"has nothing else\. Download the model again"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.00.pth").touch()
    with pytest.raises(CheckpointFormatError, match=r"has consolidated\.00\.pth\. Files of Meta's"):
        open_checkpoint(tmp_path)


def test_messages_name_the_files_that_the_user_named(
    dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No message or line of the log shows the folder that was written for them."""
    own = dense / "own"
    with caplog.at_level("INFO"):
        get_model(model_config=ModelConfig(model=str(own)))
    assert f"weights in {own}: mistral" in caplog.text
    with pytest.raises(CheckpointFormatError) as refused:
        ModelSource.find(ModelConfig(model=str(own), hf_overrides={"rms_norm_eps": "small"}))
    assert str(refused.value).startswith(f"config.json of {own} does not describe a model")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    source = ModelSource.find(ModelConfig(model=str(tmp_path), dtype="float32"), "mistral")
    assert source.name == str(tmp_path)
    with pytest.raises(CheckpointFormatError, match=f"^{tmp_path} has no tokenizer.json, so text"):
        Tokenizer(source.folder)


def test_dummy_weights_take_the_configuration_of_params(tmp_path: Path) -> None:
    """Values are made without any file of weights."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    loading = LoadConfig(load_format="dummy")
    model = get_model(model_config=ModelConfig(model=str(tmp_path)), load_config=loading)
    assert model.load_report is not None
    assert model.load_report.ok

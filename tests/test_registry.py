"""Models from outside: registered by a call, announced by a package, or in a user's file."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import threading
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build import registry
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.build.registry import (
    load_model_code,
    model_class,
    register_model,
    supported_architectures,
)
from vllm_module.core.module import vLLMModule
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig, parse_config, read_entries
from vllm_module.layers import FusedMoE
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM, MistralForCausalLM
from vllm_module.testing import model_configs

# Pytest's importlib mode has no imports between test files.
OUTSIDE: Any = runpy.run_path(str(Path(__file__).with_name("outside.py")))
_registrations, folder, code, tokens, forget_files = (
    OUTSIDE[name] for name in ("_registrations", "folder", "code", "tokens", "forget_files")
)
CPU, CONFIG, Outside = (OUTSIDE[name] for name in ("CPU", "CONFIG", "Outside"))


def test_a_file_of_a_users_own_reaches_every_rank(folder: Path, code: Path) -> None:
    """``LLM(model_code=...)`` runs the model in the file, on ranks in other processes too."""
    expected = tokens(folder, model_code=code)
    assert len(expected) == 4
    assert tokens(folder, model_code=code, tensor_parallel_size=2) == expected


def test_layers_in_a_users_file_are_no_architectures(code: Path) -> None:
    """The list of architectures has the file's models, and not what they are made of.

    Other classes are no models, whatever their name is.
    """
    before = supported_architectures()
    code.write_text(f"{code.read_text()}\nfrom vllm_module import vLLMModule\n"
                    "class OutsideLayer(vLLMModule):\n    pass\n"
                    "class MistralForCausalLM:\n    compute_logits = None\n")  # fmt: skip
    load_model_code(code)
    assert supported_architectures() == sorted([*before, "OutsideForCausalLM"])
    assert model_class(["MistralForCausalLM"]) is MistralForCausalLM


def test_a_registered_model_goes_before_all_others(folder: Path, code: Path) -> None:
    """A call goes before a file, and both go before our own model of that name."""
    config = ModelConfig(model=str(folder), model_code=code)
    of_file = get_model(model_config=config, device_config=DeviceConfig(device="cpu"))
    assert type(of_file).__module__.startswith("model_code_mine")
    register_model("OutsideForCausalLM", Outside)
    assert model_class(["OutsideForCausalLM"]) is Outside
    register_model("LlamaForCausalLM", Outside)
    assert model_class(["LlamaForCausalLM"]) is Outside


def test_a_class_may_be_named(folder: Path) -> None:
    """``"package.module:Class"`` is imported when the model is built."""
    register_model("OutsideForCausalLM", "vllm_module.models.llama:LlamaForCausalLM")
    assert model_class(["OutsideForCausalLM"]) is LlamaForCausalLM
    assert "OutsideForCausalLM" in supported_architectures()


def announce(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    # Patched, because a test installs no package.
    points = [EntryPoint("OutsideForCausalLM", value, "vllm_module.models") for value in values]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._announced.cache_clear()


def test_an_installed_package_announces_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group ``vllm_module.models`` is a model; two of a name are refused.

    They are one if two packages announce the same class.
    """
    for count in (1, 2):
        announce(monkeypatch, *["vllm_module.models.llama:LlamaForCausalLM"] * count)
        assert model_class(["OutsideForCausalLM"]) is LlamaForCausalLM
    announce(monkeypatch, "one.module:Model", "another:Model")
    with pytest.raises(UnsupportedModelError, match=r"one\.module:Model, another:Model; choose"):
        model_class(["OutsideForCausalLM"])


def test_an_announcement_is_read_as_python_reads_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may name a class in a class, and extras; replacing a model of ours is a warning."""
    monkeypatch.setattr(LlamaForCausalLM, "Nested", LlamaForCausalLM, raising=False)
    for value in ("{}.Nested", "{} [extra]", "{}.Nested [a,b]"):
        announce(monkeypatch, value.format("vllm_module.models.llama:LlamaForCausalLM"))
        assert model_class(["OutsideForCausalLM"]) is LlamaForCausalLM
    for value in ("vllm_module.models.llama", "vllm_module.models.llama:", "no name"):
        announce(monkeypatch, value)
        with pytest.raises(UnsupportedModelError, match=r"should be named package\.module:Class"):
            model_class(["OutsideForCausalLM"])
    point = EntryPoint("GemmaForCausalLM", "vllm_module.models.llama:LlamaForCausalLM", "x")
    own = EntryPoint("LlamaForCausalLM", "vllm_module.models.llama:LlamaForCausalLM", "x")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point, own])
    registry._announced.cache_clear()
    with caplog.at_level("INFO", "vllm_module"):
        assert model_class(["LlamaForCausalLM"]) is LlamaForCausalLM
    levels = {record.args[0]: record.levelname for record in caplog.records if record.args}
    assert levels["LlamaForCausalLM"] == "WARNING"


def test_a_source_takes_registrations_along(folder: Path, code: Path) -> None:
    """A pickled source restores the file's classes where they are not known."""
    import pickle  # the protocol that ranks in other processes get it by

    data = pickle.dumps(ModelSource.find(ModelConfig(model=str(folder), model_code=code)))
    forget_files()
    source = pickle.loads(data)
    assert source.config.tie_word_embeddings is True
    assert type(source.build(CPU)).__name__ == "OutsideForCausalLM"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 300_000}, "larger model than the checkpoint"),
        ({"n_layer": None}, "n_layer should be a valid integer, got None"),
        ({"n_layer": "4"}, "n_layer should be a valid integer, got '4'"),
        ({"num_attention_heads": 2}, "n_head and num_attention_heads are the same entry"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings should be a valid boolean"),
        ({"n_positions": 0}, "should be greater than 0"),
        ({"attention_bias": 1}, "attention_bias should be a valid boolean, got 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps should be a finite number, got nan"),
    ],
)
def test_a_configuration_is_checked_as_its_class_declares(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """One message has the file, its own name of the entry, what was expected and what came."""
    register_model("OutsideForCausalLM", Outside)
    entries = CONFIG | change
    if "num_hidden_layers" in change:
        del entries["n_layer"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointFormatError) as refused:
        get_model(model_config=ModelConfig(model=str(tmp_path)))
    assert message in str(refused.value)


@pytest.mark.parametrize("own", [102, 103])
def test_parameters_of_other_threads_are_not_counted(own: int) -> None:
    """A model of one tensor may have 102 parameters, and other threads build what they like."""
    elsewhere: list[torch.nn.Module] = []

    def build() -> None:
        elsewhere.extend(torch.nn.Linear(1, 1) for _ in range(60))

    def in_another_thread() -> None:
        another = threading.Thread(target=build)
        another.start()
        another.join()

    class Large(vLLMModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.zeros(1) for _ in range(own - 1))
            in_another_thread()
            try:
                self.last = torch.nn.Parameter(torch.zeros(1))
            finally:  # refused or not
                in_another_thread()

    register_model("OutsideForCausalLM", Large)
    refused = pytest.raises(CheckpointFormatError, match="more than 102 parameters")
    with refused if own > 102 else nullcontext():
        build_model(Outside.config_class(**CONFIG), torch.float32, CPU, tensors=1)
    assert len(elsewhere) == 120


def test_a_nested_configuration_is_lifted() -> None:
    """The entries of the text model are read; what it leaves out is the outer object's."""

    class Nested(LlamaConfig):
        nested_config = "text_config"

    text = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 5}
    outer = {"architectures": ["X"], "hidden_size": 99, "tie_word_embeddings": True}
    text |= {"intermediate_size": 4, "architectures": ["TextModel"]}
    config = Nested(**outer, text_config=text)
    assert config.architectures == ["X"]  # by which the class of the model was found
    assert (config.hidden_size, config.num_hidden_layers) == (8, 3)
    assert (config.tie_word_embeddings, config.head_dim, config.num_key_value_heads) == (True, 4, 2)
    with pytest.raises(ValueError, match="text_config should be an object, got 3"):
        Nested(**outer, text_config=3)


@pytest.mark.parametrize("stored", ["sliding_window", "window"])
@pytest.mark.parametrize("nested", ["text_config", None])
def test_null_is_as_absent_in_a_nested_configuration(nested: str | None, stored: str) -> None:
    """So an entry is that of the text model, else the outer one, else the default."""

    class Nested(HFConfig):
        nested_config = nested
        attribute_map = {"sliding_window": "window"}

    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 5}
    ways: list[dict[str, int | None]] = [{}, {stored: None}, {stored: 3}, {stored: 4}]
    for outer, inner in itertools.product(ways, ways):
        config = Nested(architectures=["X"], **sizes, **outer, text_config=inner)
        given = (inner.get(stored) if nested else None) or outer.get(stored)
        assert config.sliding_window == given, (outer, inner)
        assert config.num_key_value_heads == 2


@pytest.mark.parametrize("names", [{}, {"hidden_size": "n_embd"}])
def test_entries_under_other_names_are_refused_with_what_declares_them(
    names: dict[str, str],
) -> None:
    """The error of a missing entry names ``attribute_map``; with the declaration it is found."""

    class Renamed(HFConfig):
        attribute_map = names

    entries: dict[str, Any] = {"architectures": ["X"], "n_embd": 8, "vocab_size": 5}
    entries |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    if names:
        assert parse_config(Renamed, entries, Path("config.json")).hidden_size == 8
        return
    with pytest.raises(CheckpointFormatError, match=r"hidden_size is missing.*attribute_map of"):
        parse_config(Renamed, entries, Path("config.json"))


class Experts(vLLMModule):
    """Its configuration does not say which values an entry may have."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.experts = FusedMoE(4, 2, config.hidden_size, 8, scoring_func=config.scoring_func)


def test_what_a_layer_refuses_is_an_unsupported_model() -> None:
    """Experts that cannot be chosen as config.json says are refused when the model is built."""
    register_model("Experts", Experts)
    entries = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5}
    config = HFConfig(architectures=["Experts"], scoring_func="tanh", **entries)
    with pytest.raises(UnsupportedModelError, match="scoring_func 'tanh': expected 'softmax' or"):
        build_model(config, torch.float32, CPU)


@pytest.mark.parametrize(
    "name", ["n_positions", "max_sequence_length", "seq_length", "max_seq_len", "model_max_length"]
)
def test_every_name_that_bounds_positions_counts(name: str) -> None:
    """The limit is found by each of its names, and the least of several counts."""
    entries = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5}
    bare = {"architectures": ["X"], **entries}
    assert HFConfig(**bare).context_length is None
    assert HFConfig(**bare, **{name: 9}).context_length == 9
    assert HFConfig(**bare, **{name: 9}, max_position_embeddings=7).context_length == 7
    assert HFConfig(**bare, **{name: 9}, max_position_embeddings=70).context_length == 9


def test_null_is_no_value_under_either_name() -> None:
    """An entry that is null under one name has the value that is given under the other."""
    entries = CONFIG | {"hidden_size": None}
    assert Outside.config_class(**entries).hidden_size == 16
    entries = CONFIG | {"n_embd": None, "hidden_size": 16}
    assert Outside.config_class(**entries).hidden_size == 16


@given(model_configs(Outside))
@settings(max_examples=5)
def test_configurations_are_drawn_of_a_models_own_class(config: HFConfig) -> None:
    """``model_configs`` takes a class that is not registered, with the defaults of its entries."""
    assert isinstance(config, Outside.config_class)
    assert config.architectures == ["Outside"]
    assert Outside(config).expected_weights()


def test_an_override_beside_rotations_of_layer_types(tmp_path: Path) -> None:
    """It is refused where it would be one of theirs, and taken where it is not."""
    ropes = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": ropes}))
    with pytest.raises(CheckpointFormatError, match=r"hf_overrides has rope_theta, which .* layer"):
        read_entries(tmp_path, {"rope_theta": 5.0, "eos_token_id": 1})
    taken = read_entries(tmp_path, {"eos_token_id": 1})
    assert taken == {"rope_parameters": ropes, "eos_token_id": 1}

"""Models from outside: registered by a call, announced by a package, or in a user's file."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from vllm_module import LLM, DeviceConfig, ModelConfig, SamplingParams, get_model
from vllm_module.build import registry
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.build.registry import model_class, register_model, supported_architectures
from vllm_module.core.module import vLLMModule
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.layers import FusedMoE, ReplicatedLinear
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM
from vllm_module.testing import model_configs, random_weights, write_checkpoint

CPU = torch.device("cpu")
NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
CONFIG: dict[str, Any] = {
    "architectures": ["OutsideForCausalLM"],
    "n_embd": 16,
    "intermediate_size": 32,
    "n_layer": 1,
    "n_head": 4,
    "vocab_size": 32,
    "n_positions": 64,
    "dtype": "float32",
}
# A user's file: its model reads other names, and ties the head unless config.json says otherwise.
CODE = f"""
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM

class OutsideConfig(LlamaConfig):
    attribute_map = { ({ours: stored for stored, ours in NAMES.items()})!r}
    tie_word_embeddings: bool = True

class OutsideForCausalLM(LlamaForCausalLM):
    config_class = OutsideConfig
"""


class Outside(LlamaForCausalLM):
    class config_class(LlamaConfig):
        attribute_map = {ours: stored for stored, ours in NAMES.items()}
        tie_word_embeddings: bool = True


def forget_files() -> None:
    """Make this process one that has not run any file of a user's."""
    registry.registered.files.clear()
    registry._from_files.clear()
    for name in [name for name in sys.modules if name.startswith("model_code_mine")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers: the registry belongs to the process."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    yield
    forget_files()
    registry._announced.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of the architecture from outside."""
    folder = tmp_path_factory.mktemp("outside")
    model = Outside(Outside.config_class(**CONFIG))
    write_checkpoint(folder, random_weights(model.expected_weights(), seed=0), config=CONFIG)
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def tokens(folder: Path, **options: Any) -> list[int]:
    with LLM(str(folder), device="cpu", kv_cache_memory_bytes=1 << 18, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        assert output.error is None
        return output.outputs[0].token_ids


def test_a_file_of_a_users_own_reaches_every_rank(folder: Path, code: Path) -> None:
    """``LLM(model_code=...)`` runs the model in the file, on ranks in other processes too."""
    expected = tokens(folder, model_code=code)
    assert len(expected) == 4
    assert tokens(folder, model_code=code, tensor_parallel_size=2) == expected


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


class NoConfigClass(vLLMModule):
    config_class = dict

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.head = ReplicatedLinear(config.hidden_size, config.vocab_size)


BAD_MODELS: dict[str, tuple[Any, type[Exception], str]] = {
    "no class": (3, TypeError, "should be a subclass of vLLMModule"),
    "another class": (torch.nn.Linear, TypeError, "should be a subclass of vLLMModule"),
    "an instance": (torch.nn.Identity(), TypeError, "should be a subclass of vLLMModule"),
    "no colon": ("package.module.Class", ValueError, "expected 'package.module:Class'"),
    "no class after the colon": ("package:", ValueError, "expected 'package.module:Class'"),
    "no such module": ("nowhere.at_all:X", UnsupportedModelError, "nowhere"),
    "no such class": ("vllm_module.models.llama:X", UnsupportedModelError, "has no attribute 'X'"),
    "a relative module": (".x:X", UnsupportedModelError, "cannot be imported: TypeError"),
    "a function": ("os:path", UnsupportedModelError, "subclass of vLLMModule"),
    "a config class of another kind": (NoConfigClass, UnsupportedModelError, "config_class should"),
}


@pytest.mark.parametrize(("model", "error", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_what_is_no_model_is_refused(
    folder: Path, model: Any, error: type[Exception], message: str
) -> None:
    """The error says what was expected, at the call or when the model is found."""

    def register_and_find() -> None:
        register_model("OutsideForCausalLM", model)
        ModelSource.find(ModelConfig(model=str(folder)))

    with pytest.raises(error, match=message):
        register_and_find()


BAD_FILES = {
    "not there": (None, "is not a Python file"),
    "another ending": ("", "is not a Python file"),
    "no model": ("x = 1", "has no model"),
    "a syntax error": ("def", "fails: SyntaxError"),
    "an error": ("\n1 / 0", "fails in line 2: ZeroDivisionError"),
    "no output": ("import sys\nsys.stdout = None", "sets sys.stdout or sys.stderr to None"),
    "an error that is no Exception": (
        "class Own(BaseException): ...\nraise Own('no')",
        "fails in line 2: Own: no",
    ),
    "a module that removes itself": (
        "import sys\ndel sys.modules[__name__]\n1 / 0",
        "fails in line 3: ZeroDivisionError",
    ),
    "an exit": ("import sys\nsys.exit(0)", "fails in line 2: SystemExit: 0"),
    "an unknown import": ("import nowhere_at_all", "fails in line 1: ModuleNotFoundError"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_without_a_model_is_refused(tmp_path: Path, name: str) -> None:
    """The refusal names the file and why; a corrected file can be loaded afterwards."""
    text, message = BAD_FILES[name]
    path = tmp_path / ("mine.txt" if name == "another ending" else "mine.py")
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        registry.load_model_code(path)
    assert str(path) in str(refused.value)
    if path.suffix == ".py":
        path.write_text(CODE + "\n# corrected")
        registry.load_model_code(path)
        assert model_class(["OutsideForCausalLM"]).__name__ == "OutsideForCausalLM"


@pytest.mark.parametrize("path", ["a\0b.py", "loop.py", "~nobody_of_this_name/x.py", "x" * 300])
def test_what_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A path that the system cannot follow is one that is no Python file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(UnsupportedModelError, match="is not a Python file"):
        registry.load_model_code(Path(path))


def test_a_path_need_not_be_text(tmp_path: Path) -> None:
    """A file whose name is bytes of no encoding is run, too."""
    path = tmp_path / os.fsdecode(b"mine\xff.py")
    path.write_text(CODE)
    registry.load_model_code(path)
    assert model_class(["OutsideForCausalLM"]).__name__ == "OutsideForCausalLM"


# What the class below has instead, what raises, and in which line of the file.
FAILING = """
from vllm_module.models.llama import LlamaForCausalLM

class OutsideForCausalLM(LlamaForCausalLM):
    """
FAILURES = {
    "raises": ("def __init__(self, config): 1 / 0", " in line 5: ZeroDivisionError"),
    "exits": ("def __init__(self, config): raise SystemExit(0)", " in line 5: SystemExit: 0"),
    "ends": ("def __init__(self, config): raise BaseException", " in line 5: BaseException"),
    "takes nothing": ("def __init__(self): pass", ": TypeError"),
    "takes two": ("def __init__(self, config, more): pass", ": TypeError"),
    "constructs nothing": ("def __init__(self, config): pass", ": AttributeError"),
    "constructs late": ("def __init__(self, c): self.x = Llama", " in line 5: NameError"),
    "no metadata": ("def forward(self, ids, positions): pass", ": TypeError"),
    "forward raises": ("def forward(self, *_): {}[3]", " in line 5: KeyError: 3"),
    "forward exits": ("def forward(self, *_): raise SystemExit(0)", " in line 5: SystemExit: 0"),
    "forward ends": ("def forward(self, *_): raise BaseException", " in line 5: BaseException"),
    "logits raise": ("def compute_logits(self, h): raise OSError", " in line 5: OSError"),
}


@pytest.mark.parametrize(("body", "message"), FAILURES.values(), ids=FAILURES)
def test_a_model_from_outside_that_fails_is_refused(
    folder: Path, code: Path, body: str, message: str
) -> None:
    """The refusal has the model, its file, the line and the signatures, and the cause."""
    code.write_text(FAILING + body)
    config = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64}
    overrides = {NAMES.get(name, name): value for name, value in config.items()}
    overrides["tie_word_embeddings"] = True
    with pytest.raises(UnsupportedModelError) as refused:
        tokens(folder, model_code=code, hf_overrides=overrides)
    text = str(refused.value)
    assert text.startswith(f"the model OutsideForCausalLM of {code} fails{message}")
    assert text.endswith("called with (input_ids, positions, metadata)")
    assert type(refused.value.__cause__).__name__ in text


FAILING_TO_LOAD = """
from vllm_module import vLLMModule
from vllm_module.models.llama import LlamaForCausalLM

class Part(vLLMModule):
    {part}

class OutsideForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.part = Part()

    {whole}
"""
LOADING = {
    "loads": ("", "def load_weights(self, w): raise {0}", "load_weights", 13),
    "loads late": (
        "",
        "def load_weights(self, w): return super().load_weights(w), self._late()\n"
        "    def _late(self): raise {0}",
        "_late",
        14,
    ),
    "processes": (
        "def process_weights_after_loading(self): raise {0}", "",
        "part.process_weights_after_loading", 6,
    ),
}  # fmt: skip
ERRORS = ["BaseException('x')", "SystemExit(3)", "ValueError('x')", "OSError(2, 'x')"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("part", "whole", "where", "line"), LOADING.values(), ids=LOADING)
def test_code_from_outside_that_fails_while_it_loads_is_named(
    folder: Path, code: Path, part: str, whole: str, where: str, line: int, error: str
) -> None:
    """The message has the module's path, the method, the file, the line and the cause."""
    body = [(each or "pass").replace("{0}", error) for each in (part, whole)]
    code.write_text(FAILING_TO_LOAD.format(part=body[0], whole=body[1]))
    with pytest.raises(UnsupportedModelError) as refused:
        load_outside(folder, code)
    kind = error.partition("(")[0].replace("OSError", "FileNotFoundError")
    text = str(refused.value)
    assert text.startswith(f"{where} of {code} fails in line {line} while weights are loaded: ")
    assert kind in text
    assert type(refused.value.__cause__).__name__ == kind


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "MemoryError('x')"])
@pytest.mark.parametrize("name", ["loads", "processes"])
def test_interrupts_while_it_loads_stay_as_they_are(
    folder: Path, code: Path, name: str, error: str
) -> None:
    part, whole, _, _ = LOADING[name]
    body = [(each or "pass").replace("{0}", error) for each in (part, whole)]
    code.write_text(FAILING_TO_LOAD.format(part=body[0], whole=body[1]))
    with pytest.raises((KeyboardInterrupt, GeneratorExit, MemoryError)) as raised:
        load_outside(folder, code)
    assert type(raised.value).__name__ == error.partition("(")[0]


def test_our_errors_below_code_from_outside_stay_as_they_are(folder: Path, code: Path) -> None:
    """A bug or a failure of ours, which an override calls, is not the override's."""
    whole = "def load_weights(self, w): return super().load_weights(5)"
    code.write_text(FAILING_TO_LOAD.format(part="pass", whole=whole))
    with pytest.raises(TypeError, match="is not iterable"):
        load_outside(folder, code)


def load_outside(folder: Path, code: Path) -> None:
    config = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64}
    overrides = {NAMES.get(name, name): value for name, value in config.items()}
    overrides["tie_word_embeddings"] = True
    get_model(
        model_config=ModelConfig(model=str(folder), model_code=code, hf_overrides=overrides),
        device_config=DeviceConfig(device="cpu"),
    )


@pytest.mark.parametrize("body", ["compute_logits = None", "compute_logits = 3"])
def test_an_engine_needs_logits(folder: Path, code: Path, body: str) -> None:
    """A model without ``compute_logits`` is loaded by ``get_model``, and refused by an engine."""
    code.write_text(f"{CODE}    {body}")
    config = ModelConfig(model=str(folder), model_code=code)
    get_model(model_config=config, device_config=DeviceConfig(device="cpu"))
    with pytest.raises(UnsupportedModelError, match=r"expected a method compute_logits\(hidden\)"):
        tokens(folder, model_code=code)


def test_a_bug_in_a_model_of_ours_stays_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only models from outside are blamed."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LlamaForCausalLM, "__init__", fail)  # our models have no bug to find
    register_model("OutsideForCausalLM", "vllm_module.models.llama:LlamaForCausalLM")
    overrides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ZeroDivisionError):
        get_model(model_config=ModelConfig(model=str(folder), hf_overrides=overrides))


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

"""Models from outside that are none, or fail: the message names what, and where."""

from __future__ import annotations

import os
import runpy
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.build import registry
from vllm_module.build.model_source import ModelSource
from vllm_module.build.registry import model_class, register_model
from vllm_module.core.module import vLLMModule
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.layers import ReplicatedLinear
from vllm_module.models.llama import LlamaForCausalLM

# Pytest's importlib mode has no imports between test files.
OUTSIDE: Any = runpy.run_path(str(Path(__file__).with_name("outside.py")))
_registrations, folder, code, tokens, CODE, NAMES = (
    OUTSIDE[name] for name in ("_registrations", "folder", "code", "tokens", "CODE", "NAMES")
)


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
    "not there": (None, "does not exist"),
    "another ending": ("", "is not a Python file"),
    "no model": ("x = 1", "has no model"),
    "a class that is no model": ("class OutsideForCausalLM:\n    x = 1", "has no model"),
    "a module of torch": (
        "from torch import nn\nclass OutsideForCausalLM(nn.Linear): ...",
        "has no model",
    ),
    "a model of others": (
        "from vllm_module.models.llama import LlamaForCausalLM as OutsideForCausalLM",
        "has no model",
    ),
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


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LamaForCausalLM"])
def test_a_file_without_the_checkpoints_architecture_is_told(
    folder: Path, code: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Else a class with a misspelt name would be left out, and another model run in silence."""
    code.write_text(f"from vllm_module import vLLMModule\nclass {name}(vLLMModule):\n    {LOGITS}")
    register_model("ElsewhereForCausalLM", LlamaForCausalLM)
    find_llama(folder, code)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"model_code {code} has no class for LlamaForCausalLM of config.json, so another model is "
        "built: it has ElsewhereForCausalLM, LamaForCausalLM. Name the class as the architecture"
    ] * (name == "LamaForCausalLM")


def test_a_file_with_a_source_alone_is_not_told(
    folder: Path, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file may be there for another reason than its models."""
    code.write_text("from vllm_module import register_source\nregister_source('near', str)")
    find_llama(folder, code)
    assert not caplog.records


LOGITS = "def compute_logits(self, hidden): return hidden"


def find_llama(folder: Path, code: Path) -> None:
    config = {"n_embd": 16, "n_layer": 1, "n_head": 4}
    overrides: dict[str, Any] = {NAMES[name]: value for name, value in config.items()}
    overrides["architectures"] = ["LlamaForCausalLM"]
    ModelSource.find(ModelConfig(model=str(folder), model_code=code, hf_overrides=overrides))


@pytest.mark.parametrize("path", ["a\0b.py", "loop.py", "~nobody_of_this_name/x.py", "x" * 300])
def test_what_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A path that the system cannot follow is one that is no Python file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(UnsupportedModelError, match="is not a Python file"):
        registry.load_model_code(Path(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """By its name it could be one; a pipe is not opened, which would wait for what writes to it."""
    path = tmp_path / "mine.py"
    make(path)

    def end_the_wait() -> None:
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    late = threading.Timer(5, end_the_wait)
    late.start()
    try:
        with pytest.raises(UnsupportedModelError, match="is not a Python file: expected"):
            registry.load_model_code(path)
    finally:
        late.cancel()


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


@pytest.mark.parametrize("base", ["vLLMModule", "LlamaForCausalLM"])
def test_an_entry_that_is_missing_for_want_of_a_config_class_is_told(
    folder: Path, code: Path, base: str
) -> None:
    """The advice is for a model that has none; Llama's has declared what it reads."""
    code.write_text(
        "from vllm_module import vLLMModule\n"
        "from vllm_module.models.llama import LlamaForCausalLM\n"
        f"class OutsideForCausalLM({base}):\n"
        "    def __init__(self, config): config.inner_size"
    )
    with pytest.raises(CheckpointFormatError, match=r"config\.json has no 'inner_size'") as refused:
        load_outside(folder, code)
    advised = "OutsideForCausalLM has no config_class: set it to a subclass of HFConfig"
    assert (advised in str(refused.value)) == (base == "vLLMModule")


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

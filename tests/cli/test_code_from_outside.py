"""Whatever code from outside raises, wherever it is called: one message that says whose it was."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from vllm_module.build import registry
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime.ranks.extension import worker_class
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.weights import source

Run = Callable[..., Any]

RAISES = """
class Broken({kind}):
    pass

def broken(self=None, *_, **__):
    raise Broken("on purpose")

def broken_with_values(module, args):
    return None if args[0].is_meta else broken()

"""
# Code with one marker for each place that is called; all but one marker are removed.
CONFIGURATION = """
from transformers import Qwen3Config
#import# broken()

class OwnConfig(Qwen3Config):
    model_type = "own_of_the_tests"
    #init# __init__ = broken
"""
MODELING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
#import# broken()

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
    #tie# tie_weights = broken
    #forward# forward = broken

    def __init__(self, config):
        #init# broken()
        super().__init__(config)
        #run# self.model.layers[0].register_forward_pre_hook(broken_with_values)
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizer
#import# broken()

class OwnTokenizer(PreTrainedTokenizer):
    def __init__(self, **options):
        #init# broken()
        super().__init__(eos_token="z", **options)

    @property
    def vocab_size(self):
        return 26

    def get_vocab(self):
        #vocab# broken()
        return {chr(97 + number): number for number in range(26)}

    def _tokenize(self, text, **options):
        #encode# broken()
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) - 97

    def _convert_id_to_token(self, index):
        return chr(97 + index % 26)

    def convert_tokens_to_string(self, tokens):
        #decode# broken()
        return "".join(tokens)
"""
MODEL = """
from vllm_module.models.qwen3 import Qwen3ForCausalLM as Base
#import# broken()

class Qwen3ForCausalLM(Base):
    #class# class config_class(Base.config_class): model_post_init = broken
    #init# __init__ = broken
    #forward# forward = broken
    #logits# compute_logits = broken
    #load# load_weights = broken
    #process# process_weights_after_loading = broken
    #more# secondary_weights = broken
    pass
"""
SOURCE = """
from pathlib import Path
from vllm_module.weights.source import Folder, register_source
#import# broken()

class Handle:
    def __init__(self, handle):
        self._handle, self.dtype = handle, handle.dtype

    @property
    def shape(self):
        #shape# broken()
        return self._handle.shape

    def narrow(self, *cut):
        return Handle(self._handle.narrow(*cut))

    def read(self):
        #read# broken()
        return self._handle.read()

    def read_into(self, destination):
        #read# broken()
        self._handle.read_into(destination)

class Pairs(dict):
    #items# items = broken
    #close# close = broken
    #fingerprint# fingerprint = property(broken)

class Own:
    def __init__(self, url):
        #open# broken()
        self._inner = Folder(Path(FOLDER))

    @property
    def folder(self):
        #folder# broken()
        return self._inner.folder

    def weights(self):
        #weights# broken()
        return Pairs({name: Handle(each) for name, each in self._inner.weights().items()})

register_source("own", Own)
"""
PARTS = {
    "configuration_own.py": CONFIGURATION,
    "modeling_own.py": MODELING,
    "tokenization_own.py": TOKENIZATION,
    "model.py": MODEL,
    "source.py": SOURCE,
}
MARK = re.compile(r"#(\w+)# ?")
PLACES = [
    (file, place) for file, text in PARTS.items() for place in dict.fromkeys(MARK.findall(text))
]


def written(file: str, place: str | None, kind: str = "Exception") -> str:
    """Return the code of ``file``, which raises at one place, or at none."""
    lines = []
    for line in PARTS[file].splitlines():
        marked = MARK.search(line)
        lines.append(
            line if marked is None or marked[1] == place else line[: marked.start()] + "pass"
        )
    return RAISES.format(kind=kind) + MARK.sub("", "\n".join(lines))


@pytest.fixture(autouse=True)
def _registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a file registers, and modules that are imported from a checkpoint."""
    # Replaced: what a process registers or imports stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    monkeypatch.setattr(registry, "registered_sources", sources := {})
    monkeypatch.setattr(source, "registered_sources", sources)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    registry._from_files.clear()
    for name in [each for each in sys.modules if each.startswith("transformers_modules")]:
        del sys.modules[name]


def of_trusted_code(folder: Path, files: dict[str, str]) -> list[str]:
    """Have the checkpoint name the code in ``files``; return options."""
    for name, text in files.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config |= {"model_type": "own_of_the_tests", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    return [str(folder), "--trust-remote-code"]


def of_tokenizer(folder: Path, text: str) -> list[str]:
    """Have the tokenizer be code; return options."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenization_own.py").write_text(text)
    entries = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return [str(folder), "--trust-remote-code"]


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
@pytest.mark.parametrize(("file", "place"), PLACES)
def test_what_it_raises_is_one_message(
    run: Run, with_text: Path, tmp_path: Path, file: str, place: str, kind: str
) -> None:
    """The command says what was raised and whose code raised it, and ends with 1."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(with_text, folder)
    text = written(file, place, kind)
    if file in ("configuration_own.py", "modeling_own.py"):
        files = {name: written(name, None) for name in ("configuration_own.py", "modeling_own.py")}
        options, whose = of_trusted_code(folder, files | {file: text}), "Own"
    elif file == "tokenization_own.py":
        options, whose = of_tokenizer(folder, text), "the tokenizer of"
    else:
        code = tmp_path / file
        code.write_text(text.replace("FOLDER", repr(str(folder))))
        where = "own://x" if file == "source.py" else str(folder)
        options, whose = (
            [where, "--model-code", str(code)],
            "own://x" if file == "source.py" else "model.py",
        )
    if place in ("import", "run") and file != "tokenization_own.py":
        whose = file
    result = run("generate", *options, "--prompt", "ab", "--max-new-tokens", "2", "--device", "cpu")
    assert result.code == 1
    assert "Broken: on purpose" in result.err
    assert whose in result.err
    assert "Traceback" not in result.err
    assert result.err.count("\n") <= 2  # a load says what it has written


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
def test_a_module_that_is_named_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A registered class and an extension of workers are imported when they are needed."""
    name = f"named_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(RAISES.format(kind=kind) + "broken()")
    monkeypatch.syspath_prepend(tmp_path)
    registry.register_model("OwnForCausalLM", f"{name}:Own")
    with pytest.raises(UnsupportedModelError, match=rf"{name}:Own .* Broken: on purpose"):
        registry.model_class(["OwnForCausalLM"])
    with pytest.raises(ValueError, match=rf"extension_cls '{name}\.Own'.* Broken: on purpose"):
        worker_class(Worker, f"{name}.Own")

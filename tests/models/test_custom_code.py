"""Models that Python files of a checkpoint define, which run only if they are trusted."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import dynamic_module_utils

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.loader import get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightLoadError
from vllm_module.runtime.text.code_tokenizer import read_tokenizer
from vllm_module.wrapped import custom_code

TOKEN_IDS = (torch.arange(12) * 37 + 5) % 60

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_of_the_tests"

    def __init__(self, logit_factor=1.0, **entries):
        super().__init__(**entries)
        self.logit_factor = logit_factor
"""
MODELING = """
from pathlib import Path

from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

Path(r"{trace}").touch()

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits * self.config.logit_factor
        return output
"""
OWN_ATTENTION = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from .configuration_own import OwnConfig

class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **others):
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        layers = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (each(hidden_states).view(shape).transpose(1, 2) for each in layers)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (
            each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (key, value)
        )
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        scores = scores + attention_mask[..., : key.shape[-2]]
        output = torch.softmax(scores, dim=-1) @ value
        return self.o_proj(output.transpose(1, 2).flatten(-2)), None

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    _supports_attention_backend = False

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, number)
"""
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


@pytest.fixture(scope="module", autouse=True)
def _modules_in_a_folder_of_the_tests(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Let transformers copy code below a temporary folder."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [each for each in sys.modules if each.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, whose code makes a file ``trace`` beside it when it runs."""
    folder = tmp_path_factory.mktemp("own") / "model"
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING.format(trace=folder.parent / "trace"))
    changes = {"model_type": "own_of_the_tests", "architectures": ["OwnForCausalLM"]}
    _change(folder, **changes, logit_factor=3.0, auto_map=AUTO_MAP)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint; its code makes a file ``trace`` beside it."""
    copy = tmp_path / "model"
    shutil.copytree(written, copy)
    code = (copy / "modeling_own.py").read_text()
    (copy / "modeling_own.py").write_text(code.replace(str(written.parent), str(tmp_path)))
    return copy


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _config(folder: Path, **settings: Any) -> ModelConfig:
    settings = {"dtype": "float32", "trust_remote_code": True} | settings
    return ModelConfig(model=str(folder), **settings)


def _logits(folder: Path, **settings: Any) -> torch.Tensor:
    model: Any = get_model(model_config=_config(folder, **settings))
    with torch.inference_mode():
        return model.compute_logits(model(TOKEN_IDS, torch.arange(len(TOKEN_IDS))))


def _expected(folder: Path) -> torch.Tensor:
    """Return the logits of Llama, by the factor: what the code computes, without the code."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder.with_name("llama"))
    with torch.inference_mode():
        return 3.0 * model(TOKEN_IDS[None]).logits[0]


@pytest.fixture
def expected(folder: Path) -> torch.Tensor:
    """Return what the code computes, without the code."""
    llama = folder.with_name("llama")
    shutil.copytree(folder, llama)
    _change(llama, model_type="llama", architectures=["LlamaForCausalLM"], auto_map=None)
    return _expected(folder)


def test_trusted_code_computes_the_model(folder: Path, expected: torch.Tensor) -> None:
    """Its logits are those of its definition, on one rank and, by its plan, on two."""
    torch.testing.assert_close(_logits(folder), expected, rtol=0, atol=1e-4)
    assert (folder.parent / "trace").exists()
    for each in run_ranks(2, lambda rank: _logits(folder)):
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-4)


def test_attention_that_the_code_computes_itself_is_ours(
    folder: Path, expected: torch.Tensor
) -> None:
    """Code that multiplies queries by keys in its forward pass runs with our paged attention."""
    (folder / "modeling_own.py").write_text(OWN_ATTENTION)
    torch.testing.assert_close(3.0 * _logits(folder), expected, rtol=0, atol=1e-4)
    for each in run_ranks(2, lambda rank: _logits(folder)):
        torch.testing.assert_close(3.0 * each, expected, rtol=0, atol=1e-4)
    with LLM(
        str(folder), trust_remote_code=True, dtype="float32", device="cpu",
        skip_tokenizer_init=True, kv_cache_memory_bytes=2**20,
    ) as llm:  # fmt: skip
        prompt = {"prompt_token_ids": TOKEN_IDS.tolist()}
        sampling = SamplingParams(max_tokens=1, temperature=0)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    assert output.outputs[0].token_ids == [int(expected[-1].argmax())]


def test_code_of_a_snapshot_is_taken_at_its_revision(
    folder: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    """In the hub's cache, files are links to blobs; the code is that of the snapshot in use."""
    for number, commit in enumerate(("0123abcd", "4567 ef.(1)")):
        repository = tmp_path / "models--owner--name"
        snapshot, blobs = (repository / kind / commit for kind in ("snapshots", "blobs"))
        shutil.copytree(folder, blobs)
        code = blobs / "modeling_own.py"
        code.write_text(code.read_text().replace("logit_factor", f"logit_factor * {number + 1}"))
        snapshot.mkdir(parents=True)
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(path)
        torch.testing.assert_close(_logits(snapshot), (number + 1) * expected, rtol=0, atol=1e-4)


def test_the_engine_generates_by_trusted_code(folder: Path, expected: torch.Tensor) -> None:
    """``LLM`` takes the option, and its first token is the most probable one."""
    with LLM(
        str(folder), trust_remote_code=True, dtype="float32", device="cpu",
        skip_tokenizer_init=True, kv_cache_memory_bytes=2**20,
    ) as llm:  # fmt: skip
        prompt = {"prompt_token_ids": TOKEN_IDS.tolist()}
        sampling = SamplingParams(max_tokens=1, temperature=0)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    assert output.outputs[0].token_ids == [int(expected[-1].argmax())]


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    "entries", [{}, {"trusted_folder": "."}, {"trust_remote_code": True}], ids=str
)
def test_code_is_not_run_without_trust(folder: Path, impl: Any, entries: dict[str, Any]) -> None:
    """The option is named, no file of the checkpoint is imported, and no entry grants trust."""
    if "trusted_folder" in entries:
        entries = {"trusted_folder": str(folder)}
    _change(folder, **entries)
    for overrides in ({}, entries):
        config = _config(folder, trust_remote_code=False, model_impl=impl, hf_overrides=overrides)
        with pytest.raises(UnsupportedModelError, match="trust_remote_code=True") as raised:
            ModelSource.find(config)
        assert "configuration_own.OwnConfig" in str(raised.value)
        assert "--trust-remote-code" in str(raised.value)
    assert not (folder.parent / "trace").exists()


def test_only_the_class_is_code(folder: Path) -> None:
    """A type that transformers knows may have a class that is code; that needs trust as well."""
    _change(folder, model_type="llama", auto_map={"AutoModelForCausalLM": "modeling_own.X"})
    with pytest.raises(UnsupportedModelError, match=r"modeling_own\.X.*trust_remote_code"):
        ModelSource.find(_config(folder, trust_remote_code=False))
    assert not (folder.parent / "trace").exists()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "SmolLM3ForCausalLM"])
def test_code_is_not_run_where_another_class_is_there(folder: Path, architecture: str) -> None:
    """A model of ours goes before the code of the checkpoint, and so does one of transformers."""
    kind = architecture.removesuffix("ForCausalLM").lower()
    _change(folder, model_type=kind, architectures=[architecture])
    with_trust, without = (_logits(folder, trust_remote_code=each) for each in (True, False))
    torch.testing.assert_close(with_trust, without, rtol=0, atol=0)
    assert not (folder.parent / "trace").exists()
    model = type(get_model(model_config=_config(folder))).__module__
    assert model == f"vllm_module.{'models.llama' if kind == 'llama' else 'wrapped.model'}"


def test_the_log_says_whose_code_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of trusted code is logged; so is code that is not run."""
    with caplog.at_level(logging.INFO, logger="vllm_module"):
        get_model(model_config=_config(folder))
        _change(folder, model_type="smollm3", architectures=["SmolLM3ForCausalLM"])
        get_model(model_config=_config(folder))
    assert f"OwnForCausalLM is code of the checkpoint, in {folder}" in caplog.messages
    assert any("code of the checkpoint is not run" in each for each in caplog.messages)


BAD = {
    "another repository": (
        {"AutoConfig": "owner/name--configuration_own.OwnConfig"},
        "another repository",
    ),
    "no file and class": ({"AutoConfig": "configuration_own"}, "FILE.CLASS"),
    "a path": ({"AutoConfig": "../configuration_own.OwnConfig"}, "FILE.CLASS"),
    "no such file": ({"AutoConfig": "other.OwnConfig"}, r"has no other\.py"),
    "no such class": ({"AutoConfig": "configuration_own.Other"}, "Other"),
    "no causal language model": ({"AutoModelForCausalLM": None}, "no AutoModelForCausalLM"),
    "no model": ({"AutoModelForCausalLM": "modeling_own.Path"}, "PreTrainedModel"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_an_auto_map_that_leads_nowhere_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    """What ``auto_map`` names is expected beside it, at the same revision."""
    auto_map = {name: value for name, value in (AUTO_MAP | changes).items() if value is not None}
    _change(folder, auto_map=auto_map)
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSource.find(_config(folder, model_impl="transformers")).build(torch.device("cpu"))


def test_a_missing_package_is_named(folder: Path) -> None:
    """Code that imports what is not installed is refused with the file and the package."""
    path = folder / "modeling_own.py"
    path.write_text("import no_such_package_of_tests\n" + path.read_text())
    with pytest.raises(UnsupportedModelError, match=r"modeling_own\.py.*no_such_package_of_tests"):
        ModelSource.find(_config(folder))
    assert not (folder.parent / "trace").exists()


def test_the_other_rules_hold_for_code(folder: Path) -> None:
    """A class that computes attention itself is refused, as transformers' own are."""
    path = folder / "modeling_own.py"
    path.write_text(
        path.read_text()
        + """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = lambda hidden_states, **others: (hidden_states, None)
"""
    )
    with pytest.raises(WeightLoadError, match="calls attention through transformers' interface 0"):
        ModelSource.find(_config(folder)).build(torch.device("cpu"))


TOKENIZATION = """
from pathlib import Path

from transformers import PreTrainedTokenizer

Path(r"{trace}").touch()

class OwnTokenizer(PreTrainedTokenizer):
    def __init__(self, **options):
        self._letters = "abcdefghijklmnopqrstuvwxyz "
        super().__init__(eos_token="</s>", **options)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return {{letter: number for number, letter in enumerate(self._letters)}}

    def _tokenize(self, text, **options):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters.index(token)

    def _convert_id_to_token(self, index):
        return self._letters[index % len(self._letters)]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""


@pytest.fixture
def with_tokenizer(folder: Path) -> Path:
    """Return the checkpoint with a tokenizer that is code."""
    code = TOKENIZATION.format(trace=folder.parent / "read")
    (folder / "tokenization_own.py").write_text(code)
    entries = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder


def test_a_tokenizer_may_be_trusted_code(with_tokenizer: Path) -> None:
    """Texts are encoded and decoded by it; texts that it fails on are refused with the reason."""
    tokenizer = read_tokenizer(with_tokenizer, trust_remote_code=True)
    assert tokenizer.encode("a cat") == [0, 26, 2, 0, 19]
    assert tokenizer.encode("a cat", most=2) == [0, 26]
    assert tokenizer.decode([2, 0, 19]) == "cat"
    assert tokenizer.continuation([2], [0, 19]) == "at"
    with pytest.raises(ValueError, match=r"cannot encode 'A'"):
        tokenizer.encode("A")


def test_a_tokenizer_is_not_run_without_trust(with_tokenizer: Path) -> None:
    """The class is named, and a model without a tokenizer takes token ids."""
    with pytest.raises(CheckpointFormatError, match=r"tokenization_own\.Own.*trust_remote"):
        read_tokenizer(with_tokenizer, trust_remote_code=False)
    assert not (with_tokenizer.parent / "read").exists()


@pytest.mark.parametrize("code", [["other/repo--tok.Tok", None], "other/repo--tok.Tok", [None, 3]])
def test_a_tokenizer_of_another_repository_is_refused(with_tokenizer: Path, code: Any) -> None:
    """Trust is in the files of the checkpoint; what else auto_map names is not looked for."""
    entries = {"auto_map": {"AutoTokenizer": code}}
    (with_tokenizer / "tokenizer_config.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer_config\.json .*'FILE\.CLASS'"):
        read_tokenizer(with_tokenizer, trust_remote_code=True)
    assert not (with_tokenizer.parent / "read").exists()


def test_a_tokenizer_whose_configuration_is_elsewhere_is_refused(with_tokenizer: Path) -> None:
    """transformers would read the configuration's class before the tokenizer's."""
    _change(with_tokenizer, auto_map=AUTO_MAP | {"AutoConfig": "other/repo--c.Config"})
    with pytest.raises(UnsupportedModelError, match=r"config\.json .*of another repository"):
        read_tokenizer(with_tokenizer, trust_remote_code=True)
    assert not (with_tokenizer.parent / "read").exists()


@pytest.mark.parametrize("name", ["modeling_own.py", "tokenization_own.py", "helper.py"])
def test_trusted_code_is_in_the_checkpoint(with_tokenizer: Path, name: str) -> None:
    """A link out of the folder is not run, whether it is named or could be imported by what is."""
    outside = with_tokenizer.parent / "outside.py"
    path = with_tokenizer / name
    outside.write_text(path.read_text() if path.exists() else "")
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    for read in (lambda: read_tokenizer(with_tokenizer, True), lambda: _logits(with_tokenizer)):
        with pytest.raises(CheckpointFormatError, match=f"{name} is a link to .*outside of"):
            read()
    assert not (with_tokenizer.parent / "read").exists()
    assert not (with_tokenizer.parent / "trace").exists()


def test_an_import_that_hangs_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another load says that it waits, and ends with what holds it up."""
    monkeypatch.setattr(custom_code, "_SILENCE", 0.01)
    monkeypatch.setattr(custom_code, "_LONGEST_IMPORT", 0.01)
    holds, done = threading.Event(), threading.Event()

    def hang() -> None:
        with custom_code.importing():
            holds.set()
            done.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    holds.wait()
    try:
        with (
            caplog.at_level(logging.WARNING, "vllm_module"),
            pytest.raises(UnsupportedModelError, match=r"longer than 0\.01 s: end it .*\.lock"),
        ):
            _logits(folder)
        assert "waiting for another process that imports" in caplog.text
    finally:
        done.set()
        thread.join()
    assert _logits(folder).isfinite().all()

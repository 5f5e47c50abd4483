"""A model is found once: configuration, tokenizer and weights come from the same folder."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.encoder_decoders import ENCODER_DECODERS
from vllm_module.build.model_source import ModelSource, build_model, read_config
from vllm_module.cli import main
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.testing import random_weights, write_checkpoint

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.!?<"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": len(LETTERS),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
NEXT = SamplingParams(temperature=0, max_tokens=8)
SMALL: Any = {"kv_cache_memory_bytes": 1 << 20, "device": "cpu"}
CPU = torch.device("cpu")


def write_snapshot(folder: Path, seed: int, letters: str, positions: int) -> Path:
    """Write a checkpoint, a tokenizer of one token a letter, and a chat template."""
    config = CONFIG | {"max_position_embeddings": positions}
    model = build_model(HFConfig(**config), torch.float32, CPU)
    weights = random_weights(model.expected_weights(), seed=seed)
    weights = {name: tensor * (1 if "norm" in name else 3) for name, tensor in weights.items()}
    write_checkpoint(folder, weights, config=config)
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = f"{letters[0]}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two snapshots of one branch that differ in every file."""
    at = tmp_path_factory.mktemp("hub") / "models--owner--name" / "snapshots"
    older = write_snapshot(at / ("a" * 40), 0, LETTERS, 64)
    return older, write_snapshot(at / ("b" * 40), 1, LETTERS[::-1], 32)


@pytest.fixture
def resolved(snapshots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Patch the hub: the branch moves after the first download. Return the ids downloaded."""
    downloaded: list[str] = []

    def download(repo_id: str, **options: Any) -> str:
        downloaded.append(repo_id)
        return str(snapshots[len(downloaded) > 1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return downloaded


def outcome(llm: LLM) -> tuple[list[int], list[int], str, int]:
    """Return results that depend on the template, the weights, the tokenizer and config.json."""
    prompt = llm.chat_prompt([{"role": "user", "content": "abc"}])["prompt_token_ids"]
    (output,) = llm.generate("abc", NEXT, use_tqdm=False)
    assert output.error is None
    (completion,) = output.outputs
    return prompt, completion.token_ids, completion.text, llm.engine.max_model_len


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_resolves_a_hub_id_once(
    size: int, snapshots: tuple[Path, Path], resolved: list[str]
) -> None:
    """Configuration, tokenizer, template and weights are of one snapshot, also after waking up.

    In the processes of other ranks the hub is not patched, so they could not find the model.
    """
    with LLM("owner/name", tensor_parallel_size=size, **SMALL) as llm:
        before = outcome(llm)
        assert (llm.source.folder, llm.source.revision) == (snapshots[0], "a" * 40)
        llm.sleep()
        llm.wake_up()
        assert outcome(llm) == before
    assert resolved == ["owner/name"]
    expected, other = (_outcome_of(folder) for folder in snapshots)
    assert before == expected
    assert all(one != two for one, two in zip(expected, other, strict=True))


def _outcome_of(folder: Path) -> tuple[list[int], list[int], str, int]:
    with LLM(str(folder), **SMALL) as llm:
        return outcome(llm)


COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "plan": ("--tp", "2"),
    "load": ("--tp", "2", "--device", "cpu"),
    "generate": ("--prompt", "abc", "--max-new-tokens", "2", "--device", "cpu"),
    "bench": ("--input-len", "4", "--output-len", "2", "--num-prompts", "1", "--device", "cpu"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_resolves_a_hub_id_once(
    command: str,
    snapshots: tuple[Path, Path],
    resolved: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder that is printed is the one that was read."""
    assert main([command, "owner/name", *COMMANDS[command], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(snapshots[0])
    assert resolved == ["owner/name"]


def test_a_chat_resolves_a_hub_id_once(
    resolved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template is checked in the folder that the model is then loaded from."""
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    options = ("--max-new-tokens", "2", "--device", "cpu")
    assert main(["chat", "owner/name", *options]) == 0, capsys.readouterr().err
    assert resolved == ["owner/name"]


def test_a_source_is_frozen_and_travels_between_processes(snapshots: tuple[Path, Path]) -> None:
    """A pickled source equals the original, and ``find`` returns it as it is."""
    source = ModelSource.find(
        ModelConfig(model=str(snapshots[0]), quantization="fp8", hf_overrides={"new": {"of": [1]}})
    )
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.config.new == {"of": [1]}
    assert ModelSource.find(copy) is copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.folder = snapshots[1]  # type: ignore[misc]


def test_only_a_snapshot_of_the_hub_has_a_revision(
    snapshots: tuple[Path, Path], tmp_path: Path
) -> None:
    """The commit is the name of the snapshot's folder; any other folder has none."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    revisions = [
        ModelSource.find(ModelConfig(model=str(folder))).revision
        for folder in (*snapshots, tmp_path)
    ]
    assert revisions == ["a" * 40, "b" * 40, None]


def test_no_process_is_started_for_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank finds the model before it starts other processes."""
    monkeypatch.setattr("vllm_module.runtime.ranks.group.Processes", None)
    with pytest.raises(CheckpointFormatError, match=r"no config\.json"):
        LLM(str(tmp_path), tensor_parallel_size=2, **SMALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_a_dtype_it_is_that_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """If config.json names no dtype, the first tensor counts that a model could run in."""
    entries = {name: value for name, value in CONFIG.items() if name != "dtype"}
    tensors = {"a.position_ids": torch.arange(3), "b": torch.zeros(1, dtype=dtype)}
    folder = write_checkpoint(tmp_path / "saved", tensors, config=entries)
    assert ModelSource.find(ModelConfig(model=str(folder))).dtype == dtype


def test_the_dtype_of_either_entry_is_the_one_of_transformers(tmp_path: Path) -> None:
    """Older files call it ``torch_dtype``; some have both, or null. Else it is the weights'."""
    folder = write_checkpoint(tmp_path / "saved", {"a": torch.zeros(1)}, config=CONFIG)
    given = [{}, {"dtype": None}, {"dtype": "float16"}, {"dtype": "bfloat16"}]
    for new, old in itertools.product(given, given):
        entries = {name: value for name, value in CONFIG.items() if name != "dtype"}
        entries |= new | {f"torch_{name}": value for name, value in old.items()}
        (folder / "config.json").write_text(json.dumps(entries | {"model_type": "llama"}))
        expected = AutoConfig.from_pretrained(folder).dtype or torch.float32
        assert ModelSource.find(ModelConfig(model=str(folder))).dtype == expected, (new, old)


@pytest.mark.parametrize(
    "entries",
    [
        {"architectures": ["OwnForConditionalGeneration"], "is_encoder_decoder": True},
        {"architectures": ["T5ForConditionalGeneration"]},
        {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": None},
    ],
    ids=str,
)
def test_an_encoder_decoder_is_named(tmp_path: Path, entries: dict[str, Any]) -> None:
    """No model of one's own would make it run; the message says so, by the name if need be."""
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match=r"is an encoder-decoder, .* can run here yet"):
        ModelSource.find(ModelConfig(model=str(tmp_path)))


def test_encoder_decoders_are_those_of_transformers() -> None:
    """The names are those of all classes whose configurations are encoder-decoders by default."""
    named = set()
    for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT"):
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            if getattr(CONFIG_MAPPING[model_type](), "is_encoder_decoder", False):
                named.add(name)
    assert len(named) > 30
    assert named <= ENCODER_DECODERS


def test_max_model_len_is_no_entry_of_the_file(tmp_path: Path) -> None:
    """By it, a model would run at positions that it does not have."""
    folder = tmp_path / "folder"
    entries = {"max_position_embeddings": 24, "max_model_len": 4096}
    write_checkpoint(folder, {}, config=CONFIG | entries)
    for chosen, expected in ((None, 24), (7, 7), (24, 24)):
        config = ModelConfig(model=str(folder), max_model_len=chosen)
        assert read_config(folder, config).max_model_len == expected
    with pytest.raises(UnsupportedModelError, match="max_model_len 25 exceeds the 24 positions"):
        read_config(folder, ModelConfig(model=str(folder), max_model_len=25))


@pytest.mark.parametrize(
    ("entries", "came"), [({}, "it is missing"), ({"architectures": []}, r"got \[\]")]
)
def test_a_file_without_architectures_says_what_it_has(
    tmp_path: Path, entries: dict[str, Any], came: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointFormatError, match=rf"architectures should be .*, {came}$"):
        read_config(tmp_path, ModelConfig(model=""))

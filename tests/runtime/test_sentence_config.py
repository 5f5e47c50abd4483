"""The files of sentence-transformers, which say how an encoder's states become one vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.pooling.sentence_config import SentenceConfig

POOLED = "cls", "mean", "last"


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*names: str, pooling: str = "1_Pooling") -> list[dict[str, Any]]:
    """Return a modules.json of sentence-transformers."""
    return [
        {
            "idx": index,
            "name": str(index),
            "path": pooling if name == "Pooling" else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]


def flags(*chosen: str) -> dict[str, Any]:
    """Return the configuration of a Pooling module, as older versions write it."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name in chosen for name in names}
    return {"word_embedding_dimension": 32, **modes, "include_prompt": True}


POOLING = "1_Pooling/config.json"
THREE = modules("Transformer", "Pooling", "Normalize")
FILES: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, "mean"),
    "cls": ({"modules.json": THREE, POOLING: flags("cls_token")}, "cls"),
    "mean": ({"modules.json": THREE[:2], POOLING: flags("mean_tokens")}, "mean"),
    "last": ({"modules.json": THREE, POOLING: flags("lasttoken")}, "last"),
    "newer": ({"modules.json": THREE, POOLING: {"pooling_mode": "cls"}}, "cls"),
    **{
        f"newer {name}": ({POOLING: {"pooling_mode": name}}, expected)
        for name, expected in (
            ("cls", "cls"), ("mean", "mean"), ("lasttoken", "last"), ("max", "by max"),
        )
    },
    "newer beside older": ({POOLING: {**flags("mean_tokens"), "pooling_mode": "cls"}}, "cls"),
    "newer that is none": ({POOLING: {**flags("mean_tokens"), "pooling_mode": None}}, "mean"),
    "no list": ({POOLING: flags("cls_token")}, "cls"),
    "a list without pooling": (
        {"modules.json": modules("Transformer", "Normalize"), POOLING: flags("cls_token")}, "mean"
    ),
    "an empty list": ({"modules.json": [], POOLING: flags("cls_token")}, "mean"),
    "twice": (
        {"modules.json": modules("Pooling", "Pooling"), POOLING: flags("cls_token")},
        "by cls_token",
    ),
    "other flags": ({POOLING: {**flags("cls_token"), "include_prompt": True, "x": True}}, "cls"),
    "flags that are no switch": ({POOLING: {"pooling_mode_cls_token": 1}}, "by nothing"),
    "elsewhere": (
        {"modules.json": modules("Pooling", pooling="p"), "p/config.json": flags("cls_token")},
        "cls",
    ),
    "max": ({"modules.json": THREE, POOLING: flags("max_tokens")}, "by max_tokens"),
    "two": (
        {"modules.json": THREE, POOLING: flags("cls_token", "mean_tokens")},
        "by cls_token and mean_tokens",
    ),
    "none": ({"modules.json": THREE, POOLING: flags()}, "by nothing"),
    "dense": (
        {"modules.json": modules("Transformer", "Pooling", "Dense"), POOLING: flags("cls_token")},
        "a module 'sentence_transformers.models.Dense'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), FILES.values(), ids=FILES)
def test_the_files_of_sentence_transformers_say_how_to_pool(
    files: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """What they ask for and is not implemented is kept as a problem, for :meth:`embed` to raise."""
    found = SentenceConfig.read(write(tmp_path, files))
    if expected in POOLED:
        assert found == SentenceConfig(pooling=expected)  # type: ignore[arg-type]  # one of them
    else:
        assert found.pooling is None
        assert found.problem.endswith(expected)


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]
)
def test_the_file_of_a_text_has_the_names_of_all_versions(kind: str, tmp_path: Path) -> None:
    """These are the names that sentence-transformers looks for; the first one there counts."""
    write(tmp_path, {f"sentence_{kind}_config.json": {"max_seq_length": 8, "do_lower_case": True}})
    assert SentenceConfig.read(tmp_path) == SentenceConfig(max_length=8, lower_case=True)
    write(tmp_path, {"sentence_bert_config.json": {"max_seq_length": 9}})
    assert SentenceConfig.read(tmp_path) == SentenceConfig(max_length=9)


@pytest.mark.parametrize("length", [1, 8, 512, None])
def test_without_a_length_it_is_the_tokenizers(length: int | None, tmp_path: Path) -> None:
    """transformers' tokenizer cuts texts there; without a length it has one of 31 digits."""
    vocabulary = {"[UNK]": 0, "a": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")),
        unk_token="[UNK]",
        **({} if length is None else {"model_max_length": length}),
    )
    tokenizer.save_pretrained(tmp_path)
    found = SentenceConfig.read(tmp_path).max_length
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.model_max_length > 1 << 40 if length is None else found == loaded.model_max_length
    assert found is None or found == length or found > 1 << 40
    write(tmp_path, {"sentence_bert_config.json": {"max_seq_length": 9}})
    assert SentenceConfig.read(tmp_path).max_length == 9


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": "{"},
        {"modules.json": {"a": 1}},
        {"modules.json": [{"type": 3, "path": ""}]},
        {"modules.json": THREE},
        {"modules.json": modules("Pooling", pooling="../other"), "../other/config.json": flags()},
        {"modules.json": THREE, POOLING: "[]"},
        {"sentence_bert_config.json": {"max_seq_length": 0}},
        {"sentence_bert_config.json": {"max_seq_length": "8"}},
    ],
)
def test_damaged_files_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    """A refusal names the file; a path out of the folder is not followed."""
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointFormatError, match=str(tmp_path)):
        SentenceConfig.read(write(tmp_path / "model", files))

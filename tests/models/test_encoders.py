"""Encoders compute the hidden states of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import MissingWeightError, ShardingError, UnsupportedModelError
from vllm_module.models.classifiers import BertClassifierConfig, RobertaClassifierConfig

WITHIN = 1e-4  # as in conftest.py
LENGTHS = [7, 16, 1, 16, 24]
SMALL: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SMALL),
    "bert, one type": BertConfig(
        **SMALL, type_vocab_size=1, hidden_act="gelu_new", layer_norm_eps=0.1
    ),
    # Positions begin after the padding token's, so two more are stored.
    "roberta": RobertaConfig(**SMALL | {"max_position_embeddings": 26}),
}
CLASSES = {
    "bert": (BertForMaskedLM, BertModel),
    "roberta": (RobertaForMaskedLM, RobertaModel),
}


def tokens(vocab: int, types: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    ids = torch.randint(vocab, (count,), generator=generator)
    ids[::5] = 1  # RoBERTa's padding token, which a text may contain
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return ids, positions, torch.randint(types, (count,), generator=generator)


class Saved(NamedTuple):
    """A checkpoint in the forms that transformers saves, and what it computes.

    Attributes:
        folder: saved by the encoder's class: no prefix, and a pooler.
        pretrained: saved by the class with the heads of pretraining: a prefix, and no pooler.
        encoder: computes the hidden states.

    """

    folder: Path
    pretrained: Path
    encoder: Any


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a tiny model with large random weights in both forms."""
    config = CONFIGS[request.param]
    pretrained_class, encoder_class = CLASSES[config.model_type]
    model = pretrained_class(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "LayerNorm" in name else 0.5 if "embeddings" in name else 0.15
        parameter.data.normal_(0, scale, generator=generator)
    encoder = encoder_class(config)
    encoder.load_state_dict(model.base_model.state_dict(), strict=False)
    pretrained, folder = (tmp_path_factory.mktemp(form) for form in ("pretrained", "encoder"))
    model.save_pretrained(pretrained)
    encoder.save_pretrained(folder)
    return Saved(folder, pretrained, encoder.eval())


@torch.no_grad()
def check(folder: Path, theirs: Any, size: int) -> None:
    """Compare all hidden states, of several sequences in one batch, on every rank."""
    ids, positions, types = tokens(130, theirs.config.type_vocab_size)

    def compute(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model: Any = get_model(model_config=ModelConfig(model=str(folder)))
        with torch.no_grad():
            return model(ids, positions, LENGTHS), model(ids, positions, LENGTHS, types)

    expected = [
        torch.cat(
            [
                theirs(sequence[None], token_type_ids=kinds[None]).last_hidden_state[0]
                for sequence, kinds in zip(
                    ids.split(LENGTHS), token_types.split(LENGTHS), strict=True
                )
            ]
        )
        for token_types in (torch.zeros_like(types), types)
    ]
    for computed in run_ranks(size, compute):
        for ours, hidden in zip(computed, expected, strict=True):
            torch.testing.assert_close(ours, hidden, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("form", ["folder", "pretrained"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_hidden_states_are_those_of_transformers(saved: Saved, form: str, size: int) -> None:
    """Sequences of a batch have the hidden states that transformers computes for each alone."""
    check(getattr(saved, form), saved.encoder, size)


def test_what_is_not_computed_is_skipped_by_a_rule(saved: Saved) -> None:
    """The pooler and the heads of pretraining are the only tensors that are not loaded."""
    for folder, parts in ((saved.folder, {"pooler"}), (saved.pretrained, {"cls", "lm_head"})):
        model = get_model(model_config=ModelConfig(model=str(folder)))
        report = model.load_report
        assert report is not None
        assert {name.partition(".")[0] for name in report.skipped} <= parts
        assert report.skipped


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the names of a checkpoint that was converted from TensorFlow, and an old buffer."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    return renamed | {"embeddings.position_ids": torch.arange(24)[None]}


def edited(folder: Path, target: Path, edit: Callable[[Any], Any], **entries: Any) -> Path:
    """Copy a checkpoint with its tensors edited and entries of its configuration replaced."""
    target.mkdir(exist_ok=True)
    save_file(edit(load_file(folder / "model.safetensors")), target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | entries
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_the_names_of_old_checkpoints(saved: Saved, tmp_path: Path) -> None:
    """``gamma`` and ``beta`` are the norms' weight and bias; stored positions are skipped."""
    target = edited(saved.folder, tmp_path, old_names)
    check(target, saved.encoder, 1)
    model = get_model(model_config=ModelConfig(model=str(target)))
    assert model.load_report is not None
    assert model.load_report.skipped == {
        "embeddings.position_ids": "positions are counted, not stored",
        "pooler.dense.weight": "embeddings are pooled from the hidden states",
        "pooler.dense.bias": "embeddings are pooled from the hidden states",
    }


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_act": "own"}, "hidden_act 'own'"),
        ({"max_model_len": 25}, "max_model_len 25 exceeds the 24 positions"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    saved: Saved, entries: dict[str, Any], message: str
) -> None:
    """Another form of attention or of positions is refused, and so is a longer sequence."""
    config = {name: value for name, value in entries.items() if name == "max_model_len"}
    overrides = {name: value for name, value in entries.items() if name not in config}
    with pytest.raises(UnsupportedModelError, match=message):
        get_model(
            model_config=ModelConfig(model=str(saved.folder), hf_overrides=overrides, **config)
        )


def test_a_missing_tensor_is_named(saved: Saved, tmp_path: Path) -> None:
    """An incomplete checkpoint is refused with the checkpoint's name of what it lacks."""
    name = "encoder.layer.1.attention.self.key.bias"
    target = edited(
        saved.folder, tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != name}
    )
    with pytest.raises(MissingWeightError, match=name):
        get_model(model_config=ModelConfig(model=str(target)))


def test_heads_that_cannot_be_divided_are_refused(saved: Saved) -> None:
    """More ranks than heads are refused with the numbers."""
    with pytest.raises(ShardingError, match=r"4 attention heads .* 3 tensor-parallel ranks"):
        run_ranks(3, lambda rank: get_model(model_config=ModelConfig(model=str(saved.folder))))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_has_the_classes_of_transformers(kind: str) -> None:
    """By their number, which some files have, else by their names, else two."""
    ours = BertClassifierConfig if kind.startswith("bert") else RobertaClassifierConfig
    given = CONFIGS[kind].to_dict() | {"architectures": ["any"]}
    names = [{str(at): f"class {at}" for at in range(count)} for count in (1, 2, 3)]
    absent = "an entry that is not there"
    for named, count in product((absent, None, *names), (absent, 1, 2, 3)):
        entries = {**given, "id2label": named, "num_labels": count}
        entries = {name: value for name, value in entries.items() if value is not absent}
        theirs = type(CONFIGS[kind]).from_dict(entries)
        assert ours.model_validate(entries).num_labels == theirs.num_labels, (named, count)

"""Encoders with a head: classes, scores of pairs, and documents in the order of their scores."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from vllm_module import LLM, PoolingParams
from vllm_module.errors import UnsupportedModelError

PARITY = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "parity.py"))
TEXTS = ["the quick fox", "a", "lazy dogs, brown foxes"]


def write_roberta(folder: Path, labels: int) -> None:
    """Write a RoBERTa with a head; its tokenizer knows one type of tokens."""
    config = RobertaConfig(
        vocab_size=130,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=40,  # no letter's, and positions begin after it
        max_position_embeddings=64 + 41,
        num_labels=labels,
        type_vocab_size=1,
    )
    PARITY["_write"](RobertaForSequenceClassification(config), folder)
    PARITY["_write_tokenizer"](folder, ["<s>", "</s>"])
    tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 129), ("<s>", 128), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    folders = {f"{kind}{labels}": root / f"{kind}{labels}" for kind in ("bert", "roberta")
               for labels in (1, 3)}  # fmt: skip
    for name, folder in folders.items():
        write = PARITY["write_classifier"] if name.startswith("bert") else write_roberta
        write(folder, int(name[-1]))
    return folders


@pytest.fixture(scope="module", params=["bert1", "bert3", "roberta1", "roberta3"])
def served(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Any]:
    folder = folders[request.param]
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with LLM(str(folder), device="cpu", max_num_seqs=2) as llm:
        yield llm, theirs


@torch.no_grad()
def logits(theirs: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    result: torch.Tensor = theirs(torch.tensor([ids]), **given).logits[0]
    return result


def test_classes_are_those_of_transformers(served: Any) -> None:
    """Probabilities are the softmax of transformers' logits, the sigmoid for one class."""
    llm, theirs = served
    outputs = llm.classify(TEXTS, use_tqdm=False)
    raw = llm.encode(
        TEXTS, PoolingParams(use_activation=False), pooling_task="classify", use_tqdm=False
    )
    for output, each in zip(outputs, raw, strict=True):
        expected = logits(theirs, output.prompt_token_ids)
        torch.testing.assert_close(each.outputs.data, expected, rtol=0, atol=1e-4)
        activated = expected.softmax(-1) if len(expected) > 1 else expected.sigmoid()
        probs = torch.tensor(output.outputs.probs)
        torch.testing.assert_close(probs, activated, rtol=0, atol=1e-5)
        assert output.outputs.num_classes == len(expected)


def test_scores_are_those_of_pairs(served: Any) -> None:
    """Both texts of a pair are read together, with their token types; N classes are no score."""
    llm, theirs = served
    if theirs.config.num_labels > 1:
        with pytest.raises(UnsupportedModelError, match="3 classes, and a score needs one"):
            llm.score("a", "b", use_tqdm=False)
        return
    outputs = llm.score("the fox", TEXTS, use_tqdm=False)
    typed = isinstance(theirs, BertForSequenceClassification)
    for output, text in zip(outputs, TEXTS, strict=True):
        ids = output.prompt_token_ids
        first = llm.get_tokenizer().encode("the fox")
        assert ids[: len(first)] == first
        types = [0] * len(first) + [1] * (len(ids) - len(first)) if typed else None
        expected = logits(theirs, ids, types).sigmoid().item()
        assert math.isclose(output.outputs.score, expected, abs_tol=1e-5)
        assert llm.get_tokenizer().encode(text, False) == [i for i in ids[len(first) :] if i < 128]
    results = llm.rerank("the fox", TEXTS, top_n=2, use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    assert [each.relevance_score for each in results] == sorted(scores, reverse=True)[:2]
    assert [TEXTS[each.index] for each in results] == [each.document for each in results]


def test_two_ranks_classify_as_one(folders: dict[str, Path]) -> None:
    """The head is whole on every rank."""
    with LLM(str(folders["bert3"]), device="cpu") as one:
        expected = [each.outputs.probs for each in one.classify(TEXTS, use_tqdm=False)]
    with LLM(str(folders["bert3"]), device="cpu", tensor_parallel_size=2) as two:
        found = [each.outputs.probs for each in two.classify(TEXTS, use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("entries", "function"),
    [
        ({"problem_type": "regression"}, lambda x: x),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "single_label_classification"}, lambda x: x.softmax(-1)),
        ({"problem_type": None}, lambda x: x.softmax(-1)),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
         torch.sigmoid),
    ],
)  # fmt: skip
def test_config_json_says_what_makes_scores(
    folders: dict[str, Path], entries: dict[str, Any], function: Any
) -> None:
    """A cross-encoder names its function, and the type of problem implies one."""
    with LLM(str(folders["bert3"]), device="cpu", hf_overrides=entries) as llm:
        (raw,) = llm.encode("abc", PoolingParams(use_activation=False), use_tqdm=False)
        (output,) = llm.classify("abc", use_tqdm=False)
    expected = function(raw.outputs.data)
    torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-6)


def test_an_unknown_function_is_refused(folders: dict[str, Path]) -> None:
    """It is not run, and not guessed."""
    entries = {"sbert_ce_default_activation_function": "os.system"}
    with pytest.raises(UnsupportedModelError, match=r"asks for the activation 'os\.system'"):
        LLM(str(folders["bert3"]), device="cpu", hf_overrides=entries)


def test_methods_of_the_other_kind_are_refused(folders: dict[str, Path]) -> None:
    """A classifier has no embeddings, and generates nothing."""
    with LLM(str(folders["bert1"]), device="cpu") as llm:
        for method in ("embed", "generate"):
            with pytest.raises(UnsupportedModelError, match=r"no embeddings|generates no text"):
                getattr(llm, method)("a", use_tqdm=False)
        for pair in ((["a", "b"], ["c", "d", "e"]), ("a", []), ([], ["a"])):
            with pytest.raises(ValueError, match="data_1 should have one text or as many"):
                llm.score(*pair, use_tqdm=False)
        with pytest.raises(ValueError, match="a text to score should be text, got 3"):
            llm.score("a", [3], use_tqdm=False)
        long = "a" * 70
        with pytest.raises(ValueError, match="document 1: the prompt has 75 tokens"):
            llm.rerank("ab", ["b", long], use_tqdm=False)
        refused = llm.score("ab", ["b", long], use_tqdm=False)
        assert [each.error is None for each in refused] == [True, False]
        assert math.isnan(refused[1].outputs.score)
        (cut,) = llm.score("ab", long, truncate=True, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 64
        assert cut.prompt_token_ids[:4] == [128, 0, 1, 129]


@pytest.fixture(scope="module")
def bare(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an encoder without its head."""
    source, bare = folders["bert1"], tmp_path_factory.mktemp("bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (bare / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith("classifier")}
    save_file(kept, bare / "model.safetensors")
    return bare


def test_an_encoder_without_a_head_scores_by_cosine(folders: dict[str, Path], bare: Path) -> None:
    """The score is the cosine of embeddings; tokens' embeddings are transformers' hidden states."""
    theirs = AutoModel.from_pretrained(folders["bert1"]).eval()
    with LLM(str(bare), device="cpu") as llm:
        (whole,) = llm.encode("abc", pooling_task="token_embed", use_tqdm=False)
        with torch.no_grad():
            states = theirs(torch.tensor([whole.prompt_token_ids])).last_hidden_state[0]
        unit = states / states.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(whole.outputs.data, unit, rtol=0, atol=1e-4)
        vectors = [torch.tensor(e.outputs.embedding) for e in llm.embed(TEXTS, use_tqdm=False)]
        scores = [e.outputs.score for e in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        for score, vector in zip(scores, vectors, strict=True):
            assert math.isclose(score, float(vectors[0] @ vector), abs_tol=1e-5)
        assert math.isclose(scores[0], 1, abs_tol=1e-5)
        with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
            llm.classify("a", use_tqdm=False)
        ranked = llm.rerank(TEXTS[0], iter(TEXTS), top_n=1, use_tqdm=False)  # type: ignore[arg-type]
        assert [each.document for each in ranked] == TEXTS[:1]
        for wrong in (-1, True, 1.0):
            with pytest.raises(ValueError, match="top_n should be an integer from 0, or None"):
                llm.rerank(TEXTS[0], TEXTS, top_n=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dimensions should be left out"):
            llm.score("a", "b", pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
        (empty,) = llm.embed("", use_tqdm=False)
        assert empty.prompt_token_ids == [128, 129]
        assert (empty.outputs.hidden_size, empty.num_cached_tokens) == (64, 0)


def test_dimensions_are_those_that_embeddings_were_trained_for(bare: Path) -> None:
    """A shorter embedding is its first numbers, divided by their norm."""
    entries = {"matryoshka_dimensions": [16, 32]}
    with LLM(str(bare), device="cpu", hf_overrides=entries) as llm:
        (whole,) = llm.embed("abc", normalize=False, use_tqdm=False)
        params = PoolingParams(dimensions=16)
        (short,) = llm.embed("abc", pooling_params=params, use_tqdm=False)
        first = torch.tensor(whole.outputs.embedding[:16])
        found = torch.tensor(short.outputs.embedding)
        torch.testing.assert_close(found, first / first.norm(), rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="give use_activation=False of pooling_params"):
            llm.embed("abc", pooling_params=params, normalize=False, use_tqdm=False)
        with pytest.raises(ValueError, match=r"dimensions should be one of \[16, 32\], got 24"):
            llm.embed("abc", pooling_params=PoolingParams(dimensions=24), use_tqdm=False)
    with (
        LLM(str(bare), device="cpu") as llm,
        pytest.raises(ValueError, match="dimensions should be left out"),
    ):
        llm.embed("abc", pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
    wrongs: list[Any] = [{"dimensions": 0}, {"dimensions": True}, {"use_activation": 1}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="should be"):
            PoolingParams(**wrong)

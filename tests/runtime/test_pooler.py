"""Batches of prompts, and what becomes of each row, with a model that returns what it was given."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.config import EngineConfig
from vllm_module.errors import UnsupportedModelError
from vllm_module.runtime.metrics import RequestStateStats, Totals, engine_metrics
from vllm_module.runtime.pooling.embedding import EmbeddingInputs
from vllm_module.runtime.pooling.pooler import Pair, Pooler
from vllm_module.runtime.pooling.sentence_config import classifier_activation
from vllm_module.runtime.pooling_params import PoolingParams

SIZE = 4


class Model:
    """Returns of each sequence its first token, its length and two constants."""

    def __init__(self) -> None:
        self.batches: list[EmbeddingInputs] = []

    def __call__(self, inputs: EmbeddingInputs) -> torch.Tensor:
        self.batches.append(inputs)
        sequences = torch.tensor(inputs.input_ids).split(inputs.lengths)
        rows = [torch.tensor([float(ids[0]), len(ids), 2.0, -1.0]) for ids in sequences]
        rows = [row / 0 if row[0] == 13 else row for row in rows]
        if inputs.pooling == "tokens":
            return torch.cat([row.expand(int(row[1]), SIZE) for row in rows])
        return torch.stack(rows)


def pooler(model: Model, *, folder: Path = Path("none"), **given: Any) -> Pooler:
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 10}
    engine = EngineConfig(**{name: given.pop(name, size) for name, size in sizes.items()})
    config = SimpleNamespace(**{"vocab_size": 20, "hidden_size": SIZE, **given})
    tokenizer: Any = None
    activation = lambda row: row * 100  # noqa: E731  # told apart from softmax
    return Pooler(model, folder, config, 12, engine, lambda: tokenizer, activation)


@pytest.mark.parametrize("seed", range(12))
def test_batches_are_as_large_as_they_may_be(seed: int) -> None:
    """The longest prompts come first; each batch ends only where the next prompt does not fit."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 12))]
    prompts = [[number % 12] * length for number, length in enumerate(lengths)]
    model = Model()
    outputs = pooler(model).pool(prompts, pooling="cls", use_tqdm=False)
    for number, (output, length) in enumerate(zip(outputs, lengths, strict=True)):
        assert output.request_id == str(number)
        assert output.prompt_token_ids == prompts[number]
        expected = F.normalize(torch.tensor([number % 12, float(length), 2.0, -1.0]), dim=-1)
        assert torch.equal(output.outputs.data, expected)
    every = [length for batch in model.batches for length in batch.lengths]
    assert every == sorted(lengths, reverse=True)
    for batch, after in zip(model.batches, [*model.batches[1:], None], strict=True):
        assert len(batch.lengths) <= 3
        assert sum(batch.lengths) <= 10 or len(batch.lengths) == 1
        if after is not None:
            assert len(batch.lengths) == 3 or sum(batch.lengths) + after.lengths[0] > 10
        assert (batch.pooling, batch.token_type_ids) == ("cls", [])


def test_each_task_gets_its_own_numbers() -> None:
    """Normalized or not, cut or not, activated or not; a broken row ends its prompt alone."""
    model = Model()
    pool = pooler(model, is_matryoshka=True).pool
    row = torch.tensor([5.0, 2.0, 2.0, -1.0])
    plain = PoolingParams(use_activation=False)

    def data(task: Any = "embed", params: Any = None, **given: Any) -> torch.Tensor:
        (output,) = pool([[5, 1]], task, params, use_tqdm=False, **given)
        assert output.error is None
        return output.outputs.data

    assert torch.equal(data(), row / row.norm())
    assert model.batches[-1].pooling == "mean"  # without files of sentence-transformers
    assert torch.equal(data(params=PoolingParams(use_activation=True)), row / row.norm())
    assert torch.equal(data(params=plain), row)
    assert torch.equal(data("classify"), row * 100)
    assert model.batches[-1].pooling == "classes"
    assert torch.equal(data("classify", plain), row)
    assert torch.equal(data("token_embed"), (row / row.norm()).expand(2, 4))
    assert torch.equal(data("token_embed", plain, pooling="last"), row.expand(2, 4))
    assert model.batches[-1].pooling == "tokens"
    cut = PoolingParams(dimensions=2)
    assert torch.equal(data(params=cut), row[:2] / row[:2].norm())
    assert torch.equal(data("token_embed", cut), (row[:2] / row[:2].norm()).expand(2, 2))
    whole = PoolingParams(dimensions=SIZE, use_activation=False)
    assert torch.equal(data(params=whole), row)
    good, bad, other = pool([[5, 1], [13], [6]], params=[plain, plain, cut], use_tqdm=False)
    assert torch.equal(good.outputs.data, row)
    assert bad.error is not None
    assert bad.outputs.data.numel() == 0
    assert "NaN or infinity" in bad.error
    assert (other.error, len(other.outputs.data)) == (None, 2)


@pytest.mark.parametrize(
    ("config", "wanted", "problem"),
    [
        ({}, 4, "config.json says of no matryoshka dimensions"),
        ({"is_matryoshka": False}, 2, "config.json says of no"),
        ({"is_matryoshka": True}, 4, None),
        ({"is_matryoshka": True}, 5, "at most 4"),
        ({"matryoshka_dimensions": [2, 4]}, 2, None),
        ({"matryoshka_dimensions": [2, 4]}, 3, r"one of \[2, 4\]"),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2, 8]}, 8, r"one of \[2, 8\]"),
        ({"matryoshka_dimensions": []}, 2, "config.json says of no"),
        ({"is_matryoshka": "yes"}, 2, "config.json says of no"),
    ],
)
def test_dimensions_are_those_that_the_model_was_trained_for(
    config: dict[str, Any], wanted: int, problem: str | None
) -> None:
    """As in vLLM's PoolingParams.verify."""
    pool = pooler(Model(), **config).pool
    params = PoolingParams(dimensions=wanted)
    if problem is None:
        (output,) = pool([[1]], params=params, use_tqdm=False)
        assert output.outputs.data.shape == (wanted,)
    else:
        with pytest.raises(ValueError, match=problem):
            pool([[1]], params=params, use_tqdm=False)


def test_prompts_end_at_the_models_length(tmp_path: Path) -> None:
    """The smaller of the model's length and sentence-transformers'; truncation cuts there."""
    for entry, most in ((None, 12), (7, 7), (12, 12), (99, 12)):
        (tmp_path / "sentence_bert_config.json").write_text(
            '{"max_seq_length": %s}' % ("null" if entry is None else entry)
        )
        model = Model()
        made = pooler(model, folder=tmp_path)
        assert made.max_length == most
        fits, longer = made.pool([[1] * most, [1] * (most + 1)], use_tqdm=False)
        assert fits.error is None
        assert f"has {most + 1} tokens, and the model takes at most {most}" in (longer.error or "")
        (cut,) = made.pool([[1] * 50], truncate=True, use_tqdm=False)
        assert cut.prompt_token_ids == [1] * most
        options = {"truncate_prompt_tokens": 3}
        (cut,) = made.pool([[1] * 50], truncate=True, tokenization_kwargs=options, use_tqdm=False)
        assert cut.prompt_token_ids == [1] * 3


def test_prompts_that_no_model_computes_are_refused_alone() -> None:
    """Tokens are those from 0 up to the vocabulary's size."""
    model = Model()
    outputs = pooler(model).pool([[19], [20], [-1], [], [0]], pooling="last", use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert [batch.lengths for batch in model.batches] == [[1, 1]]
    with pytest.raises(ValueError, match="there are 1 pooling_params for 2 prompts"):
        pooler(model).pool([[1], [2]], params=[PoolingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match="pooling should be 'cls', 'mean', 'last' or None"):
        pooler(model).pool([[1]], pooling="max", use_tqdm=False)  # type: ignore[arg-type]


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("entries", "function"),
    [
        ({}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"problem_type": None}, "softmax"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "regression", "num_labels": 1}, "identity"),
        ({"sbert_ce_default_activation_function": IDENTITY, "num_labels": 1}, "identity"),
        ({"sbert_ce_default_activation_function": SIGMOID}, "sigmoid"),
        ({"sbert_ce_default_activation_function": None}, "softmax"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}, "num_labels": 1}, "identity"),
        ({"sentence_transformers": {}, "num_labels": 1}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": None}, "problem_type": "regression"},
         "identity"),
        # The newer name goes before the older one, and both before the type of the problem.
        ({"sentence_transformers": {"activation_fn": IDENTITY},
          "sbert_ce_default_activation_function": SIGMOID}, "identity"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}, "problem_type": "regression"},
         "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, None),
        ({"sbert_ce_default_activation_function": "os.system"}, None),
    ],
)  # fmt: skip
def test_scores_are_made_as_config_json_says(entries: dict[str, Any], function: str | None) -> None:
    """As in sentence-transformers' CrossEncoder, and in transformers' pipeline without a name."""
    config = SimpleNamespace(**{"num_labels": 3, **entries})
    if function is None:
        with pytest.raises(UnsupportedModelError, match=r"only Identity and Sigmoid of torch\.nn"):
            classifier_activation(config)
        return
    logits = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 0.0]])
    expected = {
        "identity": logits, "sigmoid": 1 / (1 + (-logits).exp()),
        "softmax": logits.exp() / logits.exp().sum(-1, keepdim=True),
    }[function]  # fmt: skip
    torch.testing.assert_close(classifier_activation(config)(logits), expected)


def test_metrics_have_the_names_and_kinds_of_vllm() -> None:
    """Each sum is under its own name, https://docs.vllm.ai/en/latest/usage/metrics.html."""
    totals = Totals(1, 2, 3, 4, {"stop": 5, "length": 6})
    found = engine_metrics(totals, {"model_name": "m"}, {"block_size": 8}, num_requests_running=7.0)
    assert found[-1].labels.pop("block_size") == "8"
    assert all(metric.labels == {"model_name": "m"} for metric in found[7:])
    assert [(metric.name, type(metric).__name__) for metric in found[7:-2]] == [
        ("vllm:time_to_first_token_seconds", "Histogram"),
        ("vllm:request_time_per_output_token_seconds", "Histogram"),
        ("vllm:e2e_request_latency_seconds", "Histogram"),
    ]
    del found[7:-2]
    named = {
        (metric.name, metric.labels.pop("finished_reason", None)): metric.value  # type: ignore[attr-defined]
        for metric in found
    }
    assert named == {
        ("vllm:prompt_tokens", None): 1,
        ("vllm:prefix_cache_queries", None): 1,
        ("vllm:prefix_cache_hits", None): 2,
        ("vllm:generation_tokens", None): 3,
        ("vllm:num_preemptions", None): 4,
        ("vllm:request_success", "stop"): 5,
        ("vllm:request_success", "length"): 6,
        ("vllm:num_requests_running", None): 7.0,
        ("vllm:cache_config_info", None): 1,
    }
    assert all(metric.labels == {"model_name": "m"} for metric in found)
    assert [type(metric).__name__ for metric in found] == ["Counter"] * 7 + ["Gauge"] * 2
    stats = RequestStateStats(queued_ts=2.0)
    for now in (5.0, 6.5, 9.0):
        stats.add_token(now)
    assert stats == RequestStateStats(3, 0, 0.0, 2.0, 0.0, 5.0, 9.0, 3.0)


def test_pairs_of_texts_have_types_and_are_cut_together() -> None:
    """Types go with the tokens where one is not 0; texts are in lower case where that is asked."""
    asked: list[Any] = []

    def encode_pair(first: str, second: str, most: int | None) -> tuple[list[int], list[int]]:
        asked.append((first, second, most))
        return [1, 2, 3], [0, 0, 1 if first == "typed" else 0]

    tokenizer: Any = SimpleNamespace(encode_pair=encode_pair)
    model = Model()
    made = pooler(model)
    made._get_tokenizer = lambda: tokenizer
    pairs = [Pair("typed", "B"), Pair("Plain", "B")]
    options = {"do_lower_case": True, "truncate_prompt_tokens": 5}
    made.pool(pairs, "classify", tokenization_kwargs=options, use_tqdm=False)
    assert asked == [("typed", "b", 5), ("plain", "b", 5)]
    assert [batch.token_type_ids for batch in model.batches] == [[0, 0, 1, 0, 0, 0]]
    made.pool(pairs[1:], "classify", use_tqdm=False)
    assert (asked[-1], model.batches[-1].token_type_ids) == (("Plain", "B", None), [])
    with pytest.raises(ValueError, match="special tokens separate two texts"):
        made.pool(pairs, "classify", tokenization_kwargs={"add_special_tokens": False})


def test_what_cannot_be_pooled_is_refused(tmp_path: Path) -> None:
    """A pooling that is not implemented, unless another is named; all prompts, or other types."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    made = pooler(Model(), folder=tmp_path)
    with pytest.raises(UnsupportedModelError, match="by max, which is not implemented"):
        made.pool([[1]], use_tqdm=False)
    assert made.pool([[1]], pooling="last", use_tqdm=False)[0].error is None
    with pytest.raises(ValueError, match=r"^the prompt has no tokens$"):
        made.pool([[]], pooling="cls", use_tqdm=False)
    with pytest.raises(ValueError, match="all 2 prompts are refused"):
        made.pool([[], [99]], pooling="cls", use_tqdm=False)
    with pytest.raises(ValueError, match="pooling_params should be PoolingParams, got 3"):
        made.pool([[1]], params=[3], pooling="cls", use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="pooling_params should be one or a sequence"):
        made.pool([[1]], params=3, pooling="cls", use_tqdm=False)  # type: ignore[arg-type]

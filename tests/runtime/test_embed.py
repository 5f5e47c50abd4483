"""``LLM.embed``: prompts in, vectors out."""

from __future__ import annotations

import json
import logging
import multiprocessing
import runpy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from vllm_module import LLM
from vllm_module.errors import (
    ModelNotReadyError,
    UnsupportedModelError,
    WeightReadError,
)
from vllm_module.runtime.pooling.embedding import EmbeddingInputs
from vllm_module.runtime.pooling.embedding import embed as embed_batch
from vllm_module.testing import random_weights, write_checkpoint

SERVING: Any = runpy.run_path(str(Path(__file__).parents[1] / "weights/stores_server.py"))[
    "serving"
]
LONGEST = 24
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ["the quick fox", "a", "lazy dogs, brown foxe", "the quick fix"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    config = BertConfig(
        vocab_size=130,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
    )
    model = BertModel(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "LayerNorm" in name else 0.3
        parameter.data.normal_(0, scale, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model, and a tokenizer of one token for each letter between [CLS] and [SEP]."""
    folder = tmp_path_factory.mktemp("encoder")
    theirs.save_pretrained(folder)
    letters = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz ,"]
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace("-", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_num_seqs=4, max_num_batched_tokens=40) as llm:
        yield llm


@torch.no_grad()
def hidden(theirs: Any, ids: list[int]) -> torch.Tensor:
    states: torch.Tensor = theirs(torch.tensor([ids])).last_hidden_state[0]
    return states


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "last": lambda states: states[-1],
}


def vectors(outputs: list[Any]) -> torch.Tensor:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return torch.tensor([output.outputs.embedding for output in outputs])


def embed(llm: LLM, prompts: Any, **options: Any) -> list[Any]:
    return llm.embed(prompts, use_tqdm=False, **options)


@pytest.mark.parametrize("pooling", [None, *POOLED])
def test_embeddings_are_pooled_from_the_states_of_transformers(
    llm: LLM, theirs: Any, pooling: Any
) -> None:
    """Outputs have the prompts' order and tokens, and the mean unless a pooling is stated."""
    outputs = embed(llm, TEXTS, pooling=pooling, normalize=False)
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert all(output.finished for output in outputs)
    tokenizer = llm.get_tokenizer()
    assert [output.prompt_token_ids for output in outputs] == [
        [2, *tokenizer.encode(text, False), 3] for text in TEXTS
    ]
    pool = POOLED[pooling or "mean"]
    expected = torch.stack([pool(hidden(theirs, each.prompt_token_ids)) for each in outputs])
    torch.testing.assert_close(vectors(outputs), expected, rtol=0, atol=1e-4)
    normalized = vectors(embed(llm, TEXTS, pooling=pooling))
    unit = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(normalized, unit, rtol=0, atol=1e-5)


def test_a_batch_gives_what_single_prompts_give(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches hold at most the configured sequences and tokens, whatever the lengths."""
    computed = []
    execute = llm.executor.worker.run

    def record(inputs: Any, sampled: None) -> torch.Tensor:
        computed.append(inputs.lengths)
        return execute(inputs)

    # What the executor is asked for is seen nowhere else.
    monkeypatch.setattr(llm.executor.worker, "run", record)
    lengths = [1, 24, 5, 5, 17, 1, 2, 9, 24, 1, 1, 1]
    prompts = [{"prompt_token_ids": [*range(at, at + n)]} for at, n in enumerate(lengths, 5)]
    together = vectors(embed(llm, prompts))
    assert sorted(length for batch in computed for length in batch) == sorted(lengths)
    assert len(computed) < len(lengths)
    for batch in computed:
        assert len(batch) <= 4
        assert sum(batch) <= 40
    alone = torch.cat([vectors(embed(llm, prompt)) for prompt in prompts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_prompt_longer_than_a_batch_is_computed_alone(folder: Path, theirs: Any) -> None:
    """The limit of a batch is none of a prompt, which an encoder cannot compute in chunks."""
    ids = [*range(5, 25)]
    with LLM(folder, device="cpu", max_num_batched_tokens=8) as small:
        prompts = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:3]}]
        computed = vectors(embed(small, prompts, normalize=False))
    torch.testing.assert_close(computed[0], hidden(theirs, ids).mean(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a" * 23, "the prompt has 25 tokens, and the model takes at most 24: .* truncate=True"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({"prompt_token_ids": [130]}, "token 130 is outside of the vocabulary of 130"),
        ({"prompt_token_ids": [-1]}, "token -1 is outside of the vocabulary of 130"),
        ({"prompt_token_ids": "abc"}, "a prompt should be text, a list of"),
        ({"prompt": "fox", "adapter": "sql"}, "the adapter 'sql', and encoders compute with none"),
        (None, "a prompt should be text, a list of"),
    ],
)
def test_a_refused_prompt_has_an_error_and_changes_no_other(
    llm: LLM, prompt: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One rule of errors: a call raises if every prompt is refused, else outputs have errors."""
    with pytest.raises(ValueError, match=message):
        embed(llm, [prompt])
    with caplog.at_level(logging.WARNING):
        bad, good = embed(llm, [prompt, "fox"])
    assert "1 of 2 prompts are refused: prompt 0" in caplog.text
    assert (bad.outputs.embedding, bad.finished) == ([], True)
    assert (good.error, len(good.outputs.embedding)) == (None, 32)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 30])
def test_truncation_is_that_of_transformers(llm: LLM, folder: Path, extra: int) -> None:
    """With ``truncate``, the end of a text is left out, and the special tokens stay."""
    text = "abcdefghijklmnopqrstuvwxyz"[: LONGEST - 2 + extra]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    (output,) = embed(llm, [text], truncate=True)
    assert output.prompt_token_ids == reference(text, truncation=True, max_length=LONGEST).input_ids
    (output,) = embed(llm, {"prompt_token_ids": [*range(60)]}, truncate=True)
    assert output.prompt_token_ids == [*range(LONGEST)]
    options: list[dict[str, Any]] = [{"truncation": True}, {"truncate_prompt_tokens": -1}]
    for given in options:
        (output,) = embed(llm, text, tokenization_kwargs=given)
        assert len(output.prompt_token_ids) == min(len(text) + 2, LONGEST)
    given = {"truncation": True, "max_length": 5}
    (output,) = embed(llm, text, tokenization_kwargs=given)
    assert output.prompt_token_ids == reference(text, **given).input_ids
    (output,) = embed(llm, "abc", tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == reference("abc", add_special_tokens=False).input_ids
    assert llm.model_config.max_model_len == LONGEST
    assert f"at most {LONGEST} tokens" in repr(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling should be 'cls', 'mean', 'last' or None, got 'max'"),
        ({"pooling": ["cls"]}, "pooling should be"),
        ({"normalize": 1}, "normalize should be True or False, got 1"),
        ({"truncate": 128}, "truncate should be True or False, got 128"),
    ],
)
def test_arguments_of_another_type_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    """A refusal names the argument and what it should be."""
    with pytest.raises(ValueError, match=message):
        embed(llm, "fox", **options)


def test_an_encoder_generates_nothing_and_has_no_cache(
    llm: LLM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Methods that generate are refused with advice, and no page of a KV cache is allocated."""
    refusal = r"BertModel is an encoder and generates no text: LLM\.embed"
    for generate in (
        lambda: llm.generate("fox"),
        lambda: llm.chat([{"role": "user", "content": "fox"}]),
        lambda: next(llm.stream("fox")),
    ):
        with pytest.raises(UnsupportedModelError, match=refusal):
            generate()
    assert not hasattr(llm.executor.worker, "cache")
    assert llm.engine.scheduler.pool.num_pages == 0
    with caplog.at_level(logging.INFO, "vllm_module"), LLM(folder, device="cpu"):
        assert "cache of a rank: none" in caplog.text


def test_a_decoder_embeds_nothing(model: Any, tmp_path: Path) -> None:
    """The refusal names the architecture and what to call instead."""
    config = model.config.model_dump(exclude_unset=True)
    folder = write_checkpoint(tmp_path, random_weights(model.expected_weights()), config=config)
    with (
        LLM(folder, device="cpu", kv_cache_memory_bytes=1 << 20) as llm,
        pytest.raises(UnsupportedModelError, match=r"Qwen3ForCausalLM generates text, .*embeds"),
    ):
        embed(llm, {"prompt_token_ids": [1]})


def test_weights_are_updated_and_sleep(folder: Path, theirs: Any) -> None:
    """Embeddings follow an update, a sleeping engine says so, and NaN is no embedding."""
    ids = {"prompt_token_ids": [4, 5, 6]}
    table = "embeddings.word_embeddings.weight"
    with LLM(folder, device="cpu") as llm:
        before = vectors(embed(llm, ids))
        weight = theirs.state_dict()[table].clone()
        llm.update_weights({table: weight.flip(0)})
        assert not torch.allclose(vectors(embed(llm, ids)), before, atol=1e-2)
        weight[9] = torch.nan
        with pytest.raises(WeightReadError, match=f"{table} has a NaN"):
            llm.update_weights({table: weight})
        llm.executor.worker.model.allow_nan = True
        llm.update_weights({table: weight})
        broken, whole = embed(llm, [{"prompt_token_ids": [4, 9]}, ids])
        assert "NaN or infinity: check the model's weights" in broken.error
        assert broken.outputs.embedding == []
        torch.testing.assert_close(vectors([whole]), before, rtol=0, atol=1e-6)
        llm.sleep()
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            embed(llm, ids)
        llm.wake_up()
        llm.reload_weights()
        assert torch.equal(vectors(embed(llm, ids)), before)
    with pytest.raises(RuntimeError, match="it was closed"):
        embed(llm, ids)


def test_two_ranks_give_the_same_embeddings(llm: LLM, folder: Path) -> None:
    """Ranks in processes compute what one computes, and a refused prompt ends nothing."""
    with LLM(folder, device="cpu", tensor_parallel_size=2) as two:
        with pytest.raises(ValueError, match="no tokens"):
            embed(two, {"prompt_token_ids": []})
        outputs = embed(two, [*TEXTS, {"prompt_token_ids": []}])
        torch.testing.assert_close(
            vectors(outputs[:-1]), vectors(embed(llm, TEXTS)), rtol=0, atol=1e-5
        )
        two.sleep()
        two.wake_up()
        assert torch.equal(vectors(embed(two, TEXTS)), vectors(outputs[:-1]))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda *_: torch.zeros(2, 4), r"should return .* shape \(3, hidden_size\), .* \(2, 4\)"),
        (lambda *_: torch.zeros(3), r"and returned shape \(3,\)"),
        (lambda *_: None, "and returned None"),
        (lambda *_: {}[0], r"the model Own of .*test_embed.* fails in line \d+: KeyError: 0"),
    ],
)
def test_an_encoder_from_outside_that_fails_is_refused(forward: Any, message: str) -> None:
    """The refusal names the class and what its forward should return."""
    own = type("Own", (), {"__module__": __name__, "__call__": forward})
    inputs = EmbeddingInputs([1, 2, 3], [2, 1], "mean")
    with pytest.raises(UnsupportedModelError, match=message):
        embed_batch(own(), torch.device("cpu"), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last", "tokens", "classes"])
def test_what_is_pooled_of_narrow_states_is_not_rounded(dtype: torch.dtype, pooling: Any) -> None:
    """The numbers are those that NumPy makes of the states in float64, to float32's last bits."""
    lengths = [3, 1, 7]
    states = torch.randn(sum(lengths), 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    forward = lambda *_: states  # noqa: E731  # of an encoder, with a head
    named: Any = type("Narrow", (), {"__call__": staticmethod(forward), "classify": lambda _, x: x})
    inputs = EmbeddingInputs([1] * len(states), lengths, pooling)
    result = embed_batch(named(), torch.device("cpu"), inputs)
    parts = np.split(states.double().numpy(), np.cumsum(lengths)[:-1])
    pooled = {
        "cls": [part[0] for part in parts],
        "classes": [part[0] for part in parts],
        "last": [part[-1] for part in parts],
        "mean": [part.mean(0) for part in parts],
        "tokens": [row for part in parts for row in part],
    }
    expected = torch.from_numpy(np.stack(pooled[pooling]))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)


def write_sentences(folder: Path, target: Path) -> None:
    """Copy a checkpoint, with the files that sentence-transformers writes."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    types = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "")
    listed = [{"type": f"sentence_transformers.models.{t}", "path": path} for t, path in types]
    (target / "modules.json").write_text(json.dumps(listed))
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    sentences = {"max_seq_length": 8, "do_lower_case": True}
    (target / "sentence_bert_config.json").write_text(json.dumps(sentences))


@contextmanager
def served(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a folder, on a web server that lists nothing or of an engine."""
    if how == "web":
        with SERVING(folder) as server:
            yield server.url
        return
    with LLM(folder, device="cpu") as llm, llm.serve_weights() as weights:
        monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", weights.token)
        yield weights.url


@pytest.mark.parametrize("how", ["web", "replica"])
def test_a_checkpoint_on_a_server_is_embedded_alike(
    folder: Path, theirs: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooling, length and case are those of its files, too."""
    write_sentences(folder, tmp_path)
    with served(tmp_path, how, monkeypatch) as url, LLM(url, device="cpu") as llm:
        (output,) = embed(llm, "FOX brown", normalize=False, truncate=True)
        ids = [2, *llm.get_tokenizer().encode("fox br", False), 3]
        assert output.prompt_token_ids == ids
        torch.testing.assert_close(vectors([output])[0], hidden(theirs, ids)[0], rtol=0, atol=1e-4)


def test_a_checkpoints_pooling_length_and_case_are_used(
    folder: Path, theirs: Any, tmp_path: Path
) -> None:
    """The engine embeds as sentence-transformers would, and refuses what it would cut."""
    write_sentences(folder, tmp_path)
    pooling = tmp_path / "1_Pooling/config.json"
    with LLM(tmp_path, device="cpu") as llm:
        (output,) = embed(llm, "FOX", normalize=False)
        expected = hidden(theirs, output.prompt_token_ids)[0]
        assert 1 not in output.prompt_token_ids
        torch.testing.assert_close(vectors([output])[0], expected, rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match=r"the prompt has 9 tokens, .* at most 8"):
            embed(llm, "abcdefg")
    pooling.write_text('{"pooling_mode_max_tokens": true}')
    with LLM(tmp_path, device="cpu") as llm:
        with pytest.raises(UnsupportedModelError, match=r"1_Pooling.* max_tokens, .* state a pool"):
            embed(llm, "fox")
        assert len(embed(llm, "fox", pooling="mean")) == 1

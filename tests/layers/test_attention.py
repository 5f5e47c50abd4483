"""The attention layer, and its sliding window in configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from vllm_module import vLLMModule
from vllm_module.errors import (
    DuplicateWeightError,
    MissingWeightError,
    UnexpectedWeightError,
    UnsupportedModelError,
    WeightReadError,
)
from vllm_module.hf_config import HFConfig
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    EncoderAttention,
    RotaryEmbedding,
    layer_sliding_window,
)
from vllm_module.models.llama import LlamaAttention, MistralAttention

TOKENS, PAGE = 11, 4


def metadata_of(slots: list[int], pages: list[int], context: int) -> AttentionMetadata:
    new = len(slots)
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([pages], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        max_query_len=new,
    )


@torch.inference_mode()
def test_compiled_it_writes_no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by torch.compile, which fails at them, it rotates copies of queries and keys."""
    layer, rotary_emb = Attention(4, 8, num_kv_heads=2), RotaryEmbedding(8, TOKENS)

    def attended(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split([4, 2, 2], 1)
        return layer(*rotary_emb(torch.arange(TOKENS), q, k), v)

    qkv = torch.randn(TOKENS, 8, 8)
    before = qkv.clone()
    expected = attended(qkv.clone())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(attended(qkv), expected)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (5, 1)])
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 1, 6]])
def test_a_cache_changes_no_output(
    heads: int, kv_heads: int, window: int | None, chunks: list[int]
) -> None:
    """A sequence gives the same output whole without a cache, and in any chunks with one."""
    layer = Attention(heads, 8, num_kv_heads=kv_heads, sliding_window=window)
    q = torch.randn(TOKENS, heads, 8)
    k, v = torch.randn(2, TOKENS, kv_heads, 8)
    whole = layer(q, k, v)
    assert whole.shape == (TOKENS, heads * 8)

    pages = [3, 0, 2]
    slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(TOKENS)]
    layer.kv_cache = torch.full((2, 5, PAGE, kv_heads, 8), torch.nan)
    begin, outputs = 0, []
    for count in chunks:
        end = begin + count
        part = slice(begin, end)
        outputs.append(layer(q[part], k[part], v[part], metadata_of(slots[part], pages, end)))
        begin = end
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("slots", [[13, 14, 15], [13, -1, 15], [-1, -1, -1]], ids=str)
def test_inference_mode_stores_and_attends_as_the_operators(slots, dtype) -> None:
    """In inference mode a step's layers share what they lay out, and give the same bits."""
    layer, generator = Attention(4, 8, num_kv_heads=2), torch.Generator().manual_seed(0)
    caches = torch.randn(2, 5, PAGE, 2, 8, generator=generator).to(dtype).repeat(2, 1, 1, 1, 1, 1)
    q, k, v = torch.randn(3, 3, 4, 8, generator=generator)
    results = []
    for cache, inference in zip(caches, (False, True), strict=True):
        layer.kv_cache = cache
        with torch.inference_mode(inference):
            metadata = metadata_of(slots, [2, 1, 0, 3], 16).laid_out()
            assert (metadata.layout is not None) == inference
            results += [layer(q, k[:, :2], v[:, :2], metadata) for _ in range(2)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(*caches.view(torch.uint8))


@torch.inference_mode()
def test_wrong_slots_and_pages_are_refused_in_inference_mode() -> None:
    """A cache slot or a page that the cache does not have is refused, and nothing is written."""
    layer = Attention(4, 8, num_kv_heads=2)
    layer.kv_cache = torch.zeros(2, 5, PAGE, 2, 8)
    q, kv = torch.ones(1, 4, 8), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match="cache slot 20, and the cache has 20"):
        layer(q, kv, kv, metadata_of([20], [0], 1).laid_out())
    assert not layer.kv_cache.any()
    for pages in ([5], [-1]):
        with pytest.raises(ValueError, match=rf"block_tables\[0, 0\] is page {pages[0]}"):
            layer(q, kv, kv, metadata_of([0], pages, 1).laid_out())


@pytest.mark.parametrize("lengths", [[11], [1] * 11, [3, 3, 1, 4], [4, 3, 4], [0, 3, 0, 0, 8]])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_an_encoder_attends_to_the_whole_sequence_and_to_no_other(
    lengths: list[int], scale: float | None
) -> None:
    """Each token's output is the softmax over its own sequence, before and after it."""
    q, k, v = torch.randn(3, TOKENS, 2, 8)
    output = EncoderAttention(2, 8, scale)(q, k, v, lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or 8**-0.5)
    scores = scores.masked_fill(sequence[:, None] != sequence, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, [], [0], [0, 0]])
def test_an_encoder_of_no_tokens(lengths: list[int] | None) -> None:
    """Without tokens the output has none, and as many features as usual."""
    nothing = torch.empty(0, 2, 8)
    assert EncoderAttention(2, 8)(nothing, nothing, nothing, lengths).shape == (0, 16)


def test_without_lengths_an_encoder_has_one_sequence() -> None:
    """Lengths that do not add up to the tokens are refused with the numbers."""
    q, k, v = torch.randn(3, TOKENS, 2, 8)
    layer = EncoderAttention(2, 8)
    assert torch.equal(layer(q, k, v), layer(q, k, v, [TOKENS]))
    with pytest.raises(ValueError, match="add up to 10, and there are 11 tokens"):
        layer(q, k, v, [6, 4])


def test_softcap_alibi_and_sinks_with_a_cache_and_without() -> None:
    """Soft cap, ALiBi and sinks change the output, and equally with a cache and without."""
    q, k, v = torch.randn(3, TOKENS, 2, 8)
    sinks = torch.tensor([2.0, -1.0])
    plain = Attention(2, 8)(q, k, v)
    for arguments, extra in (
        ({"softcap": 0.5}, {}),
        ({"alibi_slopes": [0.5, 0.25]}, {}),
        ({}, {"sinks": sinks}),
    ):
        layer = Attention(2, 8, **arguments)
        whole = layer(q, k, v, **extra)
        assert not torch.allclose(whole, plain, atol=1e-2)
        layer.kv_cache = torch.full((2, 3, PAGE, 2, 8), torch.nan)
        cached = layer(q, k, v, metadata_of(list(range(TOKENS)), [0, 1, 2], TOKENS), **extra)
        torch.testing.assert_close(cached, whole, rtol=0, atol=1e-6)


def test_scale() -> None:
    """The scale of the scores is head_size ** -0.5 unless given."""
    q, k, v = torch.randn(3, TOKENS, 2, 16)
    default, given = Attention(2, 16), Attention(2, 16, scale=0.25)
    assert torch.equal(default(q, k, v), given(q, k, v))
    twice = Attention(2, 16, scale=0.5)
    torch.testing.assert_close(twice(q, k, v), default(2 * q, k, v), rtol=0, atol=1e-6)
    assert not torch.allclose(twice(q, k, v), default(q, k, v), atol=1e-2)


def test_metadata_needs_a_cache() -> None:
    """Attention with metadata and without a cache raises an error."""
    q = torch.randn(1, 2, 8)
    with pytest.raises(RuntimeError, match="needs a kv_cache"):
        Attention(2, 8)(q, q, q, metadata_of([0], [0], 1))


def windows(entries: dict[str, Any]) -> list[int | None]:
    config = HFConfig(**entries | {"architectures": ["Any"]})
    mistral = entries["model_type"] == "mistral"
    rule = MistralAttention.sliding_window if mistral else layer_sliding_window
    return [rule(config, layer) for layer in range(config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MistralConfig(num_hidden_layers=3, sliding_window=7), [7, 7, 7]),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), [None, None]),
        (
            Qwen2Config(
                num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=3
            ),
            [None, None, None, 7],
        ),
        (
            Qwen3Config(
                num_hidden_layers=3, use_sliding_window=False, sliding_window=7, max_window_layers=1
            ),
            [None, None, None],
        ),
        (
            Qwen3Config(
                num_hidden_layers=3,
                use_sliding_window=True,
                sliding_window=7,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            [7, None, 7],
        ),
        (Gemma2Config(num_hidden_layers=3, sliding_window=7), [7, None, 7]),
        (GptOssConfig(num_hidden_layers=3, sliding_window=7), [7, None, 7]),
    ],
    ids=[
        "mistral",
        "mistral-none",
        "qwen2",
        "qwen3-unused",
        "qwen3-layer-types",
        "gemma2",
        "gpt-oss",
    ],
)
def test_windows_of_transformers_configurations(config: Any, expected: list[int | None]) -> None:
    """Each layer's window is what transformers' configuration says, in either version's keys."""
    entries = config.to_dict()
    assert windows(entries) == expected
    if expected != [7, None, 7]:  # transformers 4 had no other key for these
        entries.pop("layer_types", None)
        assert windows(entries) == expected


def test_the_pattern_of_older_files() -> None:
    """Without layer_types, every n-th layer of a sliding_window_pattern has no window."""
    entries = {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 3}
    entries |= {"num_hidden_layers": 5}
    reference = Gemma3TextConfig(**entries)
    entries = reference.to_dict() | entries
    expected = [7 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert expected == [7, 7, None, 7, 7]
    assert windows(entries) == expected
    assert windows(entries | {"layer_types": None}) == expected


def test_a_window_without_a_size_is_refused() -> None:
    """Windows that lack their size, or the first layer that has one, are refused by name."""
    entries = {"model_type": "any", "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    entries |= {"num_hidden_layers": 2, "sliding_window": None}
    types = ["full_attention", "sliding_attention"]
    for kind, name in (
        ({"layer_types": types}, r"layer_types\[1\] is 'sliding_attention'"),
        ({"sliding_window_pattern": 2}, "sliding_window_pattern is 2"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{name}, and sliding_window is missing"):
            windows(entries | kind)
    entries |= {"use_sliding_window": True, "sliding_window": 7}
    with pytest.raises(UnsupportedModelError, match="max_window_layers is missing"):
        windows(entries)


def test_windows_that_transformers_ignores_are_ignored() -> None:
    """A window is ignored in Llama configurations, and in Qwen's without use_sliding_window."""
    entries = {"sliding_window": 4, "max_window_layers": 0, "num_hidden_layers": 1}
    config = HFConfig(**Qwen2Config().to_dict() | entries | {"architectures": ["Any"]})
    assert LlamaAttention.sliding_window(config, 0) is None
    assert layer_sliding_window(config, 0) is None


def test_an_unknown_or_missing_layer_type_is_refused() -> None:
    """A layer without a known layer type is refused instead of getting some kind of attention."""
    entries = Qwen2Config(num_hidden_layers=2, use_sliding_window=True).to_dict()
    for layer_types in (["full_attention"], ["full_attention", "chunked_attention"]):
        changed = entries | {"layer_types": layer_types, "architectures": ["Any"]}
        with pytest.raises(UnsupportedModelError, match=r"layer_types(\[1\] is | has 1 ent)"):
            layer_sliding_window(HFConfig(**changed), 1)


def test_a_window_that_is_not_used() -> None:
    """With use_sliding_window false, the sliding_window of older Qwen files is ignored."""
    window = {"sliding_window": 7, "max_window_layers": 0, "layer_types": None}
    entries = Qwen2Config(num_hidden_layers=2).to_dict() | window
    assert windows(entries | {"use_sliding_window": False}) == [None, None]
    assert windows(entries | {"use_sliding_window": True}) == [7, 7]


class Block(vLLMModule):
    """A module with an attention layer, beside which a checkpoint stores the KV cache scales."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(4, 8, num_kv_heads=2)
        self.attn.create_kv_scales()


SCALES = {"k_scale": torch.tensor([0.03]), "v_scale": torch.tensor(0.2)}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_is_scaled_in_and_out(dtype: torch.dtype) -> None:
    """With an FP8 cache, keys and values are rounded to FP8 with their own scales."""
    block = Block()
    block.load_weights(SCALES)
    layer = block.attn
    q, (k, v) = torch.randn(TOKENS, 4, 8), torch.randn(2, TOKENS, 2, 8)
    rounded = [
        (x / scale).to(dtype).float() * scale
        for x, scale in zip((k, v), SCALES.values(), strict=True)
    ]
    expected = layer(q, *rounded)
    layer.kv_cache = torch.zeros(2, 5, PAGE, 2, 8).to(dtype)
    pages = [3, 0, 2]
    slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(TOKENS)]
    got = layer(q, k, v, metadata_of(slots, pages, TOKENS))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(got, layer(q, k, v), atol=1e-3)


def test_scales_are_stored_beside_the_layer() -> None:
    """Scales stored beside ``attn`` are loaded, missed, refused and reported by that name."""
    assert sorted(Block().expected_weights()) == ["k_scale", "v_scale"]
    with pytest.raises(MissingWeightError, match=r"\n  v_scale: expected shape \[1\]"):
        Block().load_weights({"k_scale": SCALES["k_scale"]})
    block = Block()
    assert block.load_weights(SCALES) == {"attn.k_scale", "attn.v_scale"}
    assert block.load_report is not None
    assert block.load_report.loaded["attn.k_scale"] == ["k_scale"]
    with pytest.raises(DuplicateWeightError, match=r"k_scale: attn\.k_scale is already filled by"):
        Block().load_weights([*SCALES.items(), ("attn.k_scale", SCALES["k_scale"])])
    with pytest.raises(UnexpectedWeightError, match="k_scale"):
        vLLMModule().load_weights(SCALES)
    plain = Block()
    plain.attn = Attention(4, 8)
    with pytest.raises(UnexpectedWeightError, match=r"v_scale"):
        plain.load_weights(SCALES)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_cannot_divide_is_refused(bad: float) -> None:
    """A KV cache scale that is zero, negative or not finite is refused."""
    reason = "v_scale has a NaN" if bad != bad else r"attn\.v_scale must be finite and positive"
    with pytest.raises(WeightReadError, match=reason):
        Block().load_weights(SCALES | {"v_scale": torch.tensor(bad)})

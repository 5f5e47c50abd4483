"""Dummy weights: the same values whole and in parts, which a model can be loaded with."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module import LLM, LoadConfig, ModelConfig, SamplingParams, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.cli import main
from vllm_module.distributed import pipeline_parallel, run_ranks
from vllm_module.errors import MisshapenWeightError
from vllm_module.weights import dummy, read_into
from vllm_module.weights.dummy import DummyHandle, DummyWeights

CONFIGS = runpy.run_path(str(Path(__file__).parents[1] / "models" / "configurations.py"))
DUMMY = LoadConfig(load_format="dummy")
QWEN3: dict[str, Any] = CONFIGS["config_of"]("qwen3", head_dim=16, rope_theta=10000.0)
QWEN3 |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "rms_norm_eps": 1e-6}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
IDS = torch.arange(7)


def handle(shape: list[int], dtype: torch.dtype = torch.float32, name: str = "w") -> DummyHandle:
    weights = DummyWeights({name: torch.empty(shape, dtype=dtype, device="meta")})
    made = weights[name]
    assert isinstance(made, DummyHandle)
    return made


def folder_of(folder: Path, **entries: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN3 | entries))
    return folder


def computed(folder: Path, **settings: Any) -> torch.Tensor:
    model: Any = get_model(
        model_config=ModelConfig(model=str(folder), **settings), load_config=DUMMY
    )
    with torch.inference_mode():
        logits: torch.Tensor = model.compute_logits(model(IDS, torch.arange(len(IDS))))
    return logits


@st.composite
def regions(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Draw a shape, and narrowings that follow each other."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    cuts, left = [], list(shape)
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        dim = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, left[dim]))
        length = draw(st.integers(0, left[dim] - start))
        cuts.append((dim, start, length))
        left[dim] = length
    return shape, cuts


@given(
    regions(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool]),
)
def test_a_part_has_the_values_of_the_whole(drawn: Any, dtype: torch.dtype) -> None:
    """Narrowing and reading are the same in either order, in regions of any size."""
    shape, cuts = drawn
    with pytest.MonkeyPatch.context() as patch:
        part = handle(shape, dtype)
        whole = part.read()
        patch.setattr(dummy, "_MOST", 5)  # regions of a few elements are computed one by one
        for cut in cuts:
            part, whole = part.narrow(*cut), whole.narrow(*cut)
        assert part.shape == whole.shape
        assert torch.equal(part.read(), whole)
        strided = torch.empty((*part.shape, 2), dtype=dtype)[..., 0]
        part.read_into(strided)
        assert torch.equal(strided, whole)


def test_values_are_those_of_the_formula() -> None:
    """An element is a hash of name and place, written out here with Python's integers."""

    def value(place: int) -> float:
        seed = dummy._seed("model.w")
        bits = ((place * 0x9E3779B97F4A7C15 + seed) % 2**64) >> 32
        for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
            bits = bits * factor % 2**32
            bits ^= bits >> shift
        return (bits - 2**32 if bits >= 2**31 else bits) * 2.0**-31 * 0.02 * 3**0.5

    whole = handle([1 << 20, 1 << 20], name="model.w")  # places beyond 32 bits
    for row, column in ((0, 0), (3, 5), ((1 << 20) - 1, (1 << 20) - 1)):
        read = whole.narrow(0, row, 1).narrow(1, column, 1).read().item()
        assert read == pytest.approx(value((row << 20) + column), rel=1e-6)


def test_values_are_spread_like_weights() -> None:
    """They are uniform around 0, differ between names, and neighbours do not depend on each other.

    The bounds are five times the deviation of the mean of so many independent values.
    """
    values = handle([512, 512]).read() / 0.02
    assert abs(float(values.mean())) < 5 / 512
    assert float(values.std()) == pytest.approx(1, abs=0.01)
    assert float(values.abs().max()) <= 3**0.5
    for other in (values[:, 1:] * values[:, :-1], values[1:] * values[:-1]):
        assert abs(float(other.mean())) < 5 / 512
    of_other_name = handle([512, 512], name="v").read() / 0.02
    assert abs(float((values * of_other_name).mean())) < 5 / 512


def test_each_dtype_has_values_that_a_model_can_use() -> None:
    """Floats and scales are finite, scales positive, positions in order, and given values kept."""
    expected = {
        "l.weight": torch.empty(64, 8, dtype=torch.float8_e4m3fn, device="meta"),
        "l.weight_scale_inv": torch.empty(64, device="meta"),
        "l.scale": torch.empty(64, dtype=torch.float8_e8m0fnu, device="meta"),
        "experts.down_proj_scales": torch.empty(64, dtype=torch.uint8, device="meta"),
        "g.scales": torch.empty(4, 8, device="meta"),
        "g.g_idx": torch.arange(32, dtype=torch.int32) // 8,
        "c.weight_scale": torch.empty(8, 2, device="meta"),
        "position_ids": torch.empty(1, 9, dtype=torch.int64, device="meta"),
        "step": torch.empty((), dtype=torch.int64, device="meta"),
        "codes": torch.empty(4096, dtype=torch.uint8, device="meta"),
        "norm.weight": torch.empty(4096, device="meta"),
        "norm.bias": torch.empty(4096, device="meta"),
    }
    read = {n: torch.empty(w.shape, dtype=w.dtype) for n, w in DummyWeights(expected).items()}
    for name, weight in DummyWeights(expected).items():
        read_into(weight, read[name])
    for name, meta in expected.items():
        assert (read[name].shape, read[name].dtype) == (meta.shape, meta.dtype), name
    assert read["l.weight"].float().abs().max() in (7.5, 8.0)
    for name in ("l.weight_scale_inv", "l.scale", "g.scales", "c.weight_scale"):
        scale = read[name].float()
        assert bool((scale.isfinite() & (scale >= 2**-9) & (scale <= 0.25)).all()), name
    assert set(read["experts.down_proj_scales"].tolist()) == set(range(118, 126))
    assert read["g.g_idx"].tolist() == [index // 8 for index in range(32)]
    assert read["position_ids"].tolist() == [list(range(9))]
    assert read["step"].item() == 0
    assert set(read["codes"].tolist()) == set(range(256))
    assert float(read["norm.weight"].mean()) == pytest.approx(1, abs=0.002)
    assert float(read["norm.bias"].mean()) == pytest.approx(0, abs=0.002)


def test_a_handle_refuses_what_a_tensor_refuses() -> None:
    """A dimension or range that is not there, and a destination of another shape or on meta."""
    whole = handle([4, 6])
    for cut, error in ((2, IndexError), (-3, IndexError), (0, ValueError)):
        with pytest.raises(error, match=r"w \(torch.float32, shape \[4, 6\], dummy values\)"):
            whole.narrow(cut, 3, 2)
    with pytest.raises(MisshapenWeightError, match="its destination"):
        whole.read_into(torch.empty(6, 4))
    with pytest.raises(MisshapenWeightError, match="meta device"):
        whole.read_into(torch.empty(4, 6, device="meta"))
    assert torch.equal(whole.narrow(-1, -2, 2).read(), whole.read()[:, -2:])


@pytest.mark.parametrize("quantized", [False, True], ids=["full precision", "fp8"])
def test_ranks_compute_what_one_computes(quantized: bool, tmp_path: Path) -> None:
    """A folder with config.json only is a model, and its logits are the same at every size."""
    entries: dict[str, Any] = {"quantization_config": FP8} if quantized else {}
    folder = folder_of(tmp_path, hidden_size=128, intermediate_size=128, head_dim=32, **entries)
    one = computed(folder)
    assert bool(one.isfinite().all())
    assert one.std() > 0
    for size in (2, 4):
        if quantized and size == 4:  # half a KV head would be cut inside of a block
            continue
        for other in run_ranks(size, lambda _: computed(folder)):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * float(one.abs().max()))


def test_experts_and_their_packed_weights_load(tmp_path: Path) -> None:
    """gpt-oss in MXFP4: packed codes and bytes of scales are values that the model runs with."""
    config = CONFIGS["CONFIGS"]["gpt-oss"] | {"architectures": ["GptOssForCausalLM"]}
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = computed(tmp_path)
    assert bool(one.isfinite().all())
    for other in run_ranks(2, lambda _: computed(tmp_path)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * float(one.abs().max()))


def test_online_quantization_is_that_of_the_values(tmp_path: Path) -> None:
    """Dummy values that are quantized while they load stay near those that are not."""
    folder = folder_of(tmp_path)
    one, quantized = computed(folder), computed(folder, quantization="fp8_per_channel")
    assert not torch.equal(one, quantized)
    torch.testing.assert_close(quantized, one, rtol=0, atol=0.2 * float(one.abs().max()))


def test_stages_have_the_values_of_the_whole(tmp_path: Path) -> None:
    """Ranks of all stages find the same tensors, which they compare before they load."""
    config = ModelConfig(model=str(folder_of(tmp_path)))
    source = ModelSource.find(config, "dummy")
    whole = get_model(model_config=config, load_config=DUMMY).state_dict()
    held: dict[str, torch.Tensor] = {}
    found = set()
    for rank in range(2):
        with pipeline_parallel(rank=rank, size=2):
            with source.open() as weights:
                found.add(weights.fingerprint)
            held |= get_model(model_config=config, load_config=DUMMY).state_dict()
    assert len(found) == 1
    assert held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)


def test_weights_are_neither_read_nor_downloaded(tmp_path: Path) -> None:
    """Damaged files of weights beside config.json are not opened, and LLM generates."""
    folder = folder_of(tmp_path, dtype=None)
    (folder / "model.safetensors").write_bytes(b"damaged")
    source = ModelSource.find(ModelConfig(model=str(folder)), "dummy")
    assert source.dtype == torch.float32
    with source.open() as weights:
        assert weights.load_format == "dummy"
        assert weights.files == ()
    llm = LLM(
        str(folder), load_format="dummy", device="cpu", skip_tokenizer_init=True, max_model_len=32
    )

    def generated() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
        return list(outputs[0].outputs[0].token_ids)

    first = generated()
    assert len(first) == 3
    llm.sleep()
    llm.wake_up()
    assert generated() == first
    llm.close()


def test_commands_take_dummy_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan and load say the same of bytes, load names the format, and inspect has nothing."""
    folder = folder_of(tmp_path)
    chosen = str(folder), "--load-format", "dummy"
    assert main(["plan", *chosen, "--tp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["missing"] == plan["unexpected"] == []
    assert main(["load", *chosen, "--tp", "2", "--json"]) == 0
    load = json.loads(capsys.readouterr().out)
    for planned, loaded in zip(plan["ranks"], load["ranks"], strict=True):
        assert planned["bytes_read"] == loaded["bytes_read"]
        assert loaded["load_format"] == "dummy"
    assert main(["load", *chosen]) == 0
    assert "\nformat: dummy\n" in capsys.readouterr().out
    assert main(["inspect", *chosen]) == 2
    assert "--load-format" in capsys.readouterr().err

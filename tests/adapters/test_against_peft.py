"""Adapters of many families compute what PEFT computes, on any ranks, in any batch."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import QuantizationConfig
from vllm_module.adapters import attach, detach, open_adapter
from vllm_module.distributed import pipeline_parallel, run_ranks
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.lora_slots import AdapterSlots

CPU = torch.device("cpu")
SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
ALL, FAMILIES, Tuned = SUPPORT["ALL"], SUPPORT["FAMILIES"], SUPPORT["Tuned"]
adapt, load_base, load_adapter = SUPPORT["adapt"], SUPPORT["load_base"], SUPPORT["load_adapter"]
logits_of = SUPPORT["logits_of"]
EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


def assert_as_peft(tuned: Any, ranks: int, slots: bool = False, **settings: Any) -> None:
    """Compare logits with and without the adapter, and the base's after it is gone.

    With ``slots``, what devices compute with is computed by its references.
    """

    def rank(_: int) -> tuple[torch.Tensor, ...]:
        base, rows = (
            load_base(tuned.base, **settings),
            AdapterRows(AdapterSlots(3, torch.device("cpu")) if slots else None),
        )
        before = logits_of(base, tuned.ids)
        adapter = load_adapter(base, tuned.adapter)
        attach(adapter, 5, rows)

        def choose(adapters: dict[int, int]) -> None:
            if rows.slots is None:
                rows.set(adapters, [0, len(tuned.ids)], CPU)
            else:
                rows.slots.place([8])  # in the first slot, and of no layer
                slot = rows.slots.place([5])[5] if adapters else -1
                rows.set_slots(torch.full((len(tuned.ids),), slot, dtype=torch.int32))

        choose({0: 5})
        with_it = logits_of(base, tuned.ids)
        choose({})
        without = logits_of(base, tuned.ids)
        detach(adapter, 5)
        return before, with_it, without, logits_of(base, tuned.ids)

    assert not torch.allclose(tuned.logits, tuned.base_logits, rtol=0, atol=1e-2)
    for before, with_it, without, after in run_ranks(ranks, rank):
        torch.testing.assert_close(before, tuned.base_logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(with_it, tuned.logits, rtol=0, atol=1e-5)
        assert torch.equal(without, before)
        assert torch.equal(after, before)


# Four ranks are more than most families have key-value heads, which they replicate. Slots are tried
# on two.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.at_length), 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(tuned: Callable[[str], Any], family: str, ranks: int) -> None:
    assert_as_peft(tuned(family), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_slots(tuned: Callable[[str], Any], family: str, ranks: int) -> None:
    assert_as_peft(tuned(family), ranks, slots=True)


@pytest.mark.parametrize("family", EXPERTS)
def test_expert_parallel(tuned: Callable[[str], Any], family: str) -> None:
    """Each rank has some experts, all of which the adapter adapts."""
    stored = load_file(tuned(family).adapter / "adapter_model.safetensors")
    assert any(".mlp.experts." in name for name in stored)
    for slots in (False, True):
        assert_as_peft(tuned(family), 2, slots, enable_expert_parallel=True)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_wrapped_models(tuned: Callable[[str], Any], family: str, slots: bool) -> None:
    """The wrapper of transformers' models computes adapters of experts, too."""
    assert_as_peft(tuned(family), 2, slots, model_impl="transformers")


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_one_by_one(tuned: Callable[[str], Any], tmp_path: Path, ranks: int) -> None:
    """A and B of each expert by its own, as files of before transformers 5 have them, are the same.

    The file of one tensor for all experts is written again so; what PEFT computes of it stays.
    """
    packed = tuned("mixtral")
    stored = load_file(packed.adapter / "adapter_model.safetensors")
    single, experts = {}, 4
    for name, tensor in stored.items():
        head, inner, rest = name.partition(".mlp.experts.")
        if not inner:
            single[name] = tensor
            continue
        of_gate_up = rest.startswith("base_layer.")
        is_a = rest.endswith("A.weight")
        each = tensor.view(experts, -1, tensor.shape[1]) if is_a else (
            tensor.view(len(tensor), -1, experts).permute(2, 0, 1)
        )  # fmt: skip
        for number in range(experts):
            for at, part in enumerate(("w1", "w3") if of_gate_up else ("w2",)):
                # Gate and up have the A of both; B has the rows of gate, and then those of up.
                rows = each[number] if is_a or not of_gate_up else each[number].chunk(2)[at]
                path = f"{head}.block_sparse_moe.experts.{number}.{part}"
                single[f"{path}.lora_{'A' if is_a else 'B'}.weight"] = rows.clone()
    config = json.loads((packed.adapter / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ["q_proj", "v_proj", "w1", "w2", "w3"]}
    config |= {"rank_pattern": {"w1": 8, "w3": 8}, "alpha_pattern": {"w1": 16, "w3": 16}}
    save_file(single, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = Tuned(packed.base, tmp_path, packed.ids, packed.base_logits, packed.logits)
    assert_as_peft(again, ranks)
    assert_as_peft(again, ranks, slots=True)
    base = load_base(packed.base)
    for slot in ("w1", "w2"):
        one = config | {"alpha_pattern": {rf"experts\.2\.{slot}": 3, **config["alpha_pattern"]}}
        (tmp_path / "adapter_config.json").write_text(json.dumps(one))
        with pytest.raises(UnsupportedModelError, match="another scale than other experts"):
            attach(load_adapter(base, tmp_path), 0, AdapterRows())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_copies_of_embeddings_that_have_no_adapter(tmp_path: Path, tied: bool, part: str) -> None:
    """PEFT saves them on request, and after a vocabulary was resized; others are refused."""
    entries = SUPPORT["_SIZES"] | {"tie_word_embeddings": tied, "model_type": "llama"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries)).eval()
    model.save_pretrained(tmp_path / "base")
    ids, folder = torch.arange(3, 48, 5), tmp_path / "adapter"
    with torch.no_grad():
        base_logits = model(ids[None]).logits[0]
        peft_model = adapt(model, folder, target_modules=["q_proj", "down_proj"])
        peft_model.save_pretrained(folder, save_embedding_layers=True)
        logits = peft_model(ids[None]).logits[0]
    stored = load_file(folder / "adapter_model.safetensors")
    name = next((name for name in stored if name.endswith(f".{part}.weight")), None)
    assert name is not None
    assert_as_peft(Tuned(tmp_path / "base", folder, ids, base_logits, logits), 2)
    path = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}[part]
    for scheme in () if tied else ("fp8_per_channel", "int4_per_group"):
        asked = QuantizationConfig(scheme=scheme, overrides={path: scheme}, group_size=8)
        quantized = load_base(tmp_path / "base", quantization=asked)
        with pytest.raises(WeightLoadError, match="another one than the base model's"):
            load_adapter(quantized, folder)
    changed = stored | {name: stored[name] + 1}
    save_file(changed, folder / "adapter_model.safetensors")
    with pytest.raises(WeightLoadError, match="another one than the base model's"):
        load_adapter(load_base(tmp_path / "base"), folder)


def test_an_update_is_in_place(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """New A and B go into the memory of the old ones."""
    one = tuned("qwen3")
    model = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.float32)
    other = adapt(model, tmp_path, 7, **FAMILIES["qwen3"][1])
    with torch.no_grad():
        want = other(one.ids[None]).logits[0]
    base, rows = load_base(one.base), AdapterRows()
    adapter = load_adapter(base, one.adapter)
    attach(adapter, 0, rows)
    memory = {path: each.data_ptr() for path, each in adapter.named_parameters()}
    with open_adapter(tmp_path) as (_, weights):  # of another dtype than the adapter, or not
        adapter.check_update(weights)
        adapter.update_weights(weights)
    assert {path: each.data_ptr() for path, each in adapter.named_parameters()} == memory
    rows.set({0: 0}, [0, len(one.ids)], CPU)
    torch.testing.assert_close(logits_of(base, one.ids), want, rtol=0, atol=1e-5)


def test_bfloat16(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """In 16 bits, the error beside PEFT's float32 is as large as that of PEFT in 16 bits."""
    one = tuned("qwen3")
    model = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.bfloat16)
    theirs = adapt(model, tmp_path, **ALL)
    base = load_base(one.base, dtype="bfloat16")
    rows = AdapterRows()
    attach(load_adapter(base, tmp_path), 0, rows)
    rows.set({0: 0}, [0, len(one.ids)], CPU)
    got = logits_of(base, one.ids).float()
    with torch.no_grad():
        want = theirs(one.ids[None]).logits[0].float()
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)


def test_stages(tuned: Callable[[str], Any]) -> None:
    """Each pipeline stage has the adapter of its own layers; names of the others are skipped."""
    one = tuned("llama")
    passed: Any = one.ids
    positions = torch.arange(len(one.ids))
    for stage in range(2):
        with pipeline_parallel(rank=stage, size=2):
            base, rows = load_base(one.base), AdapterRows()
        adapter = load_adapter(base, one.adapter)
        attach(adapter, 3, rows)
        rows.set({0: 3}, [0, len(one.ids)], CPU)
        with torch.no_grad():
            passed = base(passed, positions)
            if stage:
                passed = base.compute_logits(passed)
        held = {path.split(".")[2] for path, _ in adapter.named_parameters() if ".layers." in path}
        assert held == {str(stage)}
    torch.testing.assert_close(passed, one.logits, rtol=0, atol=1e-5)


def test_names_that_transformers_does_not_have(tmp_path: Path) -> None:
    """PEFT passes over names of other models; ours are among them: w2 is down_proj there.

    A and B that a file lacks of one layer alone are missed.
    """
    theirs = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    entries = SUPPORT["_SIZES"] | {"head_dim": 8, "pad_token_id": None}
    entries["layer_types"] = ["conv", "full_attention"]
    for kind, lost in ("lfm2", "w2"), ("lfm3", "g_proj"):
        base, folder, ids = tmp_path / kind, tmp_path / f"{kind} adapter", torch.arange(3, 48, 5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **entries)).eval()
        model.save_pretrained(base)
        with torch.no_grad():
            base_logits = model(ids[None]).logits[0]
            logits = adapt(model, folder, target_modules=theirs)(ids[None]).logits[0]
        assert not any(lost in name for name in load_file(folder / "adapter_model.safetensors"))
        assert_as_peft(Tuned(base, folder, ids, base_logits, logits), 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lfm3")
    adapt(model, folder, target_modules=["w2"])
    path = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if ".layers.0." not in k}, path)
    with pytest.raises(WeightLoadError, match=r"missing 2[^$]*layers\.0\.feed_forward\.down_proj"):
        load_adapter(load_base(tmp_path / "lfm3"), folder)

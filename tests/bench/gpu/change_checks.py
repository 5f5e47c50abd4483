"""What changes a model that is on the device: adapters, and updates of some elements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpu.device import Gpu
from gpu.small_engines import TINY, demand, engine, generated, relative, saved, scored
from vllm_module import DeviceConfig, ModelConfig, get_model
from vllm_module.weights.changes import find_changes

_CLOSE = 1e-4  # how far float32 may be off


def check_adapters(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Requests of two adapters and of the base, in one batch, have the logprobs of a CPU's engine.

    Those of the base have the bits of an engine without adapters.
    """
    path = saved(folder, "qwen3")
    adapters = {"one": _adapter(folder / "one", 4), "two": _adapter(folder / "two", 20)}
    names = ["one", None, "two", None, "one"]

    def compare(**options: bool) -> dict[str, float]:
        with engine(
            path, device.name, dtype="float32", enable_prefix_caching=False, **options
        ) as llm:
            before = generated(llm)
            for name, adapter in adapters.items():
                llm.load_adapter(name, str(adapter))
            found = [generated(llm, names) for _ in range(2)]
            llm.unload_adapter("two")
            llm.load_adapter("two", str(adapters["two"]))
            found.append(generated(llm, names))
        for each in found:
            for name, mine, of_base, first in zip(names, each, before, found[0], strict=True):
                mine, of_base, first = ((ids, v.tolist()) for ids, v in (mine, of_base, first))
                assert name or mine == of_base, "a row of the base has other bits beside adapters"
                assert mine == first, "repeated, a step has other bits"
        with engine(path, "cpu", dtype="float32") as llm:
            for name, adapter in adapters.items():
                llm.load_adapter(name, str(adapter))
            sequences = [sequence for sequence, _ in found[0]]
            truth, _ = scored(llm, sequences, names)
            other, _ = scored(llm, sequences, [name and "one" for name in names])
        error = relative(torch.cat([values for _, values in found[0]]), truth)
        assert relative(other, truth) > 100 * _CLOSE, "the adapters compute the same"
        return demand(error, _CLOSE, "the distance to the CPU")

    test("float32", compare)
    test("float32, no graphs", lambda: compare(enforce_eager=True))


def check_updates(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Some elements, written in place on the device, give the bits of whole tensors on the CPU."""
    path = saved(folder, "qwen3")
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"]
    stored = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    changed = {}
    for name in names:
        changed[name] = stored[name].clone()
        some = torch.randint(stored[name].numel(), (500,), generator=generator)
        changed[name].view(-1)[some] += 1

    def compare(where: str) -> dict[str, int]:
        config = ModelConfig(model=str(path), dtype="float32")
        ours, theirs = (
            get_model(model_config=config, device_config=DeviceConfig(device=each))
            for each in (device.name, "cpu")
        )
        ours.update_weights(
            {name: find_changes(stored[name].to(where), changed[name].to(where)) for name in names}
        )
        theirs.update_weights(changed)
        for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.detach().cpu(), wanted), f"{name} has other bits"
        return {"tensors": len(names)}

    for where in dict.fromkeys(("cpu", device.name)):
        test(f"from {where}", lambda where=where: compare(where))


def _adapter(folder: Path, rank: int) -> Path:
    """Save an adapter of all queries and down projections in PEFT's layout."""
    generator = torch.Generator().manual_seed(rank)
    hidden, wide = int(TINY["hidden_size"] or 0), int(TINY["intermediate_size"] or 0)
    queries = int(TINY["num_attention_heads"] or 0) * int(TINY["head_dim"] or 0)
    sizes = {"self_attn.q_proj": (hidden, queries), "mlp.down_proj": (wide, hidden)}
    tensors = {}
    for layer in range(int(TINY["num_hidden_layers"] or 0)):
        for name, (inner, outer) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, inner)), ("lora_B", (outer, rank))):
                drawn = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{prefix}.{part}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

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
_RANK = 4


def check_adapters(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Requests of an adapter, and of the base beside it, have the logprobs of the CPU's engine."""
    path, adapter = saved(folder, "qwen3"), _adapter(folder / "adapter")

    def compare() -> dict[str, float]:
        found, graphs = {}, {}
        with engine(path, device.name, dtype="float32") as llm:
            llm.load_adapter("one", str(adapter))
            for name in ("one", None):  # the base after it, whose steps replay graphs
                found[name] = generated(llm, name)
        with engine(path, "cpu", dtype="float32") as llm:
            llm.load_adapter("one", str(adapter))
            for name in ("one", None):
                sequences = [sequence for sequence, _ in found[name]]
                truth, _ = scored(llm, sequences, name)
                error = relative(torch.cat([values for _, values in found[name]]), truth)
                graphs[name] = demand(error, _CLOSE, f"the distance to the CPU, of {name}")
                other, _ = scored(llm, sequences, None if name else "one")
                assert relative(other, truth) > 100 * _CLOSE, "the adapter changes nothing"
        return graphs["one"]

    test("float32", compare)


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


def _adapter(folder: Path) -> Path:
    """Save an adapter of all queries and down projections in PEFT's layout."""
    generator = torch.Generator().manual_seed(3)
    hidden, wide = int(TINY["hidden_size"] or 0), int(TINY["intermediate_size"] or 0)
    queries = int(TINY["num_attention_heads"] or 0) * int(TINY["head_dim"] or 0)
    sizes = {"self_attn.q_proj": (hidden, queries), "mlp.down_proj": (wide, hidden)}
    tensors = {}
    for layer in range(int(TINY["num_hidden_layers"] or 0)):
        for name, (inner, outer) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (_RANK, inner)), ("lora_B", (outer, _RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{prefix}.{part}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""Scenarios of :func:`vllm_module.get_model` under a process group, for ``scenarios.py``."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model, tensor_parallel
from vllm_module.weights import open_checkpoint
from vllm_module.weights.handle import FileHandle

working = runpy.run_path(str(Path(__file__).with_name("working_together.py")))
die, hang, patience = working["die"], working["hang"], working["patience"]
await_events, TIMEOUT = working["await_events"], working["TIMEOUT"]

# Sizes that 2, 3 and 4 ranks divide.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "vocab_size": 180,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
SHAPES = {
    "model.embed_tokens": (180, 48),
    **{f"model.layers.0.self_attn.{x}_proj": (48, 48) for x in "qkvo"},
    "model.layers.0.mlp.gate_proj": (96, 48),
    "model.layers.0.mlp.up_proj": (96, 48),
    "model.layers.0.mlp.down_proj": (48, 96),
    "model.layers.0.input_layernorm": (48,),
    "model.layers.0.post_attention_layernorm": (48,),
    "model.norm": (48,),
    "lm_head": (180, 48),
}
SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}


def save(folder: Path, tensors: dict[str, torch.Tensor], **entries: Any) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))


def prepare(directory: Path) -> None:
    """Save a checkpoint and others that differ from it, in ``directory``."""
    torch.manual_seed(0)
    good = {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    norm = good.pop("model.norm.weight")
    whole = good | {"model.norm.weight": norm}
    save(directory / "good", whole)
    save(directory / "other names", good | {"model.final_norm.weight": norm})
    save(directory / "other values", {name: tensor + 1 for name, tensor in whole.items()})
    save(directory / "other config", whole, rms_norm_eps=1e-5)
    tied = whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    save(directory / "tied", tied, tie_word_embeddings=True)
    tied["lm_head.weight"][-1, -1] += 1
    save(directory / "tied in part", tied, tie_word_embeddings=True)
    damaged = directory / "damaged"
    save(damaged, whole)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.truncate(50_000)
    # One value that the fingerprint's samples do not see.
    unseen = open_checkpoint(directory / "good").fingerprint
    for place in range(len(norm)):
        folder = directory / f"unseen {place}"
        changed = norm.clone()
        changed[place] += 1
        save(folder, good | {"model.norm.weight": changed})
        if open_checkpoint(folder).fingerprint == unseen:
            folder.rename(directory / "other value unseen")
            return
    raise AssertionError("the fingerprint sees every value of this norm")


@torch.inference_mode()
def total(model: Any) -> float:
    logits = model.compute_logits(model(torch.arange(8), torch.arange(8)))
    return logits.double().abs().sum().item()


def when_reading(action: Callable[[], Any]) -> None:
    """Call ``action`` once, in the middle of a load."""
    runs_to, reads = FileHandle.runs_to, []

    def read(self: FileHandle, address: int) -> Any:
        reads.append(self)
        if len(reads) == 4:
            action()
        return runs_to(self, address)

    # No signal from outside could be timed to the middle of a load.
    FileHandle.runs_to = read  # type: ignore[method-assign]


def scenario(name: str, size: int, **of_ranks: Any) -> None:
    """Enter a load by ``size`` ranks. ``rank1="tied"`` is its folder; a function is an action."""

    def run(directory: Path, rank: int) -> Any:
        dist.init_process_group("gloo")
        special = of_ranks.get(f"rank{rank}", of_ranks.get("others", "good"))
        folder, dtype = "good", "auto"
        timeout = patience(of_ranks.values())
        if timeout == TIMEOUT and not callable(special):
            when_reading(lambda: await_events(directory))
        if callable(special):
            when_reading(lambda: special(directory))
        elif special.startswith("float"):
            dtype = special
        else:
            folder = special
        model = get_model(
            model_config=ModelConfig(model=str(directory.parent / folder), dtype=dtype),
            load_config=LoadConfig(timeout=timeout),
        )
        return total(model)

    SCENARIOS[name] = (size, run)


def replicas(*folders: str, die_in: int = -1) -> Callable[[Path, int], Any]:
    """Load each of ``folders`` in a group of two ranks that are not neighbours in the world."""
    count = len(folders)

    def run(directory: Path, rank: int) -> Any:
        dist.init_process_group("gloo")
        groups = [dist.new_group([i, i + count]) for i in range(count)]
        if rank == die_in:
            when_reading(lambda: die(directory))
        totals = []
        for folder in (folders[rank % count], "good"):
            with tensor_parallel(group=groups[rank % count]) as group:
                model = get_model(
                    model_config=ModelConfig(model=str(directory.parent / folder)),
                    load_config=LoadConfig(timeout=patience(())),
                )
            assert (group.rank, group.size) == (rank // count, 2)
            totals.append(total(model))
        try:
            with tensor_parallel(group=groups[1 - rank % count]):
                raise AssertionError("a rank outside of the group became one of it")
        except ValueError:
            return totals

    return run


def without_a_cpu_group(die_in: int) -> Callable[[Path, int], Any]:
    def run(directory: Path, rank: int) -> Any:
        dist.init_process_group("cuda:gloo")
        if rank == die_in:
            when_reading(lambda: die(directory))
        for _ in range(3):
            get_model(
                model_config=ModelConfig(model=str(directory.parent / "good")),
                load_config=LoadConfig(timeout=patience(())),
                device_config=DeviceConfig(device="cpu"),
            )

    return run


for size in (1, 2, 3, 4):
    scenario(f"load_at_{size}", size)
scenario("load_first_dies", 4, rank0=die)
scenario("load_last_dies", 2, rank1=die)
scenario("load_one_hangs", 3, rank1=hang)
scenario("load_one_file_damaged", 3, rank2="damaged")
scenario("load_one_folder_missing", 2, rank1="not there")
scenario("load_one_shard_differs", 4, rank0="tied in part", others="tied in part")
scenario("load_other_names", 3, rank1="other names")
scenario("load_other_values", 4, rank3="other values")
scenario("load_other_value_unseen", 3, rank0="other value unseen")
scenario("load_other_config", 2, rank1="other config")
scenario("load_other_dtype", 3, rank2="float16")
SCENARIOS["load_replicas"] = (4, replicas("good", "other values"))
SCENARIOS["load_replica_dies"] = (4, replicas("good", "good", die_in=3))
SCENARIOS["load_without_a_cpu_group"] = (3, without_a_cpu_group(-1))
SCENARIOS["load_without_a_cpu_group_one_dies"] = (3, without_a_cpu_group(1))

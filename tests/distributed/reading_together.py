"""Scenarios of ranks that read one checkpoint together, for ``scenarios.py``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vllm_module import (
    LoadConfig,
    ModelConfig,
    get_model,
    register_model,
    register_source,
    tensor_parallel,
)
from vllm_module.base.shared_memory import OfferedMemory
from vllm_module.cooperative import reading
from vllm_module.cooperative.reader import SharedReader
from vllm_module.core.planner import Planner
from vllm_module.distributed.shared_ring import SharedRing
from vllm_module.errors import RankError, WeightReadError
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.weights import open_checkpoint
from vllm_module.weights.digests import digests_file
from vllm_module.weights.handle import FileHandle

loading = runpy.run_path(str(Path(__file__).with_name("loading_together.py")))
working = runpy.run_path(str(Path(__file__).with_name("working_together.py")))
die, happens, stop = working["die"], working["happens"], working["stop"]
TIMEOUT, PATIENCE = working["TIMEOUT"], working["PATIENCE"]

# Tiny models fill so small a ring many times. A tensor of theirs is larger than a batch.
reading.BATCH_BYTES, reading.BUFFERS = 2048, 3
SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}

MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json, ModelConfig
    "dense": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "tied and stored twice": ({"tie_word_embeddings": True}, {}),
    "one KV head": ({"num_key_value_heads": 1}, {}),
    "experts in parts": (MIXTURE, {}),
    "whole experts": (MIXTURE, {"enable_expert_parallel": True}),
    "quantized while loading": ({}, {"quantization": "fp8"}),
    "in another dtype": ({}, {"dtype": "float16"}),
    "streamed": ({"architectures": ["Streamed"]}, {}),
    "read otherwise than planned": ({"architectures": ["Deviating"]}, {}),
}


class Streamed(LlamaForCausalLM):
    """A model that passes on a generator, and changes a tensor on its way."""

    def load_weights(self, weights: Any) -> Any:
        def changed() -> Iterator[tuple[str, Any]]:
            for name, weight in weights:
                yield name, weight.read() * 2 if name == "model.norm.weight" else weight

        return super().load_weights(changed())


class Deviating(LlamaForCausalLM):
    """A model that reads a weight early and another twice, and replaces two."""

    def load_weights(self, weights: Any) -> Any:
        pairs = dict(weights)
        pairs["model.norm.weight"].read()
        early = [pairs["model.layers.0.mlp.down_proj.weight"].read() for _ in range(2)]
        pairs["model.layers.0.mlp.down_proj.weight"] = early[0]
        pairs["model.layers.0.self_attn.o_proj.weight"] = torch.ones(48, 48)
        return super().load_weights(list(pairs.items()))


class Counted:
    """A source whose handles record the elements that a process reads, by tensor."""

    reads: Counter[str] = Counter()

    def __init__(self, url: str) -> None:
        self.folder = Path(url.partition("://")[2])

    def weights(self) -> Iterable[tuple[str, Any]]:
        opened = open_checkpoint(self.folder)
        return [(name, CountedHandle(name, handle)) for name, handle in opened.items()]


class CountedHandle:
    def __init__(self, name: str, handle: FileHandle) -> None:
        self.name, self.handle = name, handle
        self.shape, self.dtype = handle.shape, handle.dtype

    def narrow(self, dim: int, start: int, length: int) -> CountedHandle:
        return CountedHandle(self.name, self.handle.narrow(dim, start, length))

    def read_into(self, destination: torch.Tensor) -> None:
        Counted.reads[self.name] += self.shape.numel()
        self.handle.read_into(destination)

    def read(self) -> torch.Tensor:
        Counted.reads[self.name] += self.shape.numel()
        return self.handle.read()


def prepare(directory: Path) -> None:
    """Save a checkpoint for each case."""
    torch.manual_seed(1)
    for model in (Streamed, Deviating):
        register_model(model.__name__, model)
    register_source("counted", Counted)
    for name, (entries, _) in CASES.items():
        config = loading["CONFIG"] | entries
        (folder := directory / f"case {name}").mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        with tensor_parallel(rank=0, size=1):
            expected = build(folder).expected_weights()
        tensors = {each: torch.randn(tensor.shape) for each, tensor in expected.items()}
        if name == "tied and stored twice":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
        found = {each: digest_box(tensor).hex for each, tensor in tensors.items()}
        (folder / "digests.json").write_text(json.dumps(digests_file([found])))


def build(folder: Path) -> Any:
    from vllm_module.build.model_source import build_model, read_config

    config = read_config(folder, ModelConfig(model=str(folder)))
    return build_model(config, torch.float32, torch.device("cpu"))


def load(model: str, chosen: bool, timeout: float = PATIENCE, **settings: Any) -> Any:
    """Load a model; ranks that read together compare digests, but of what an override changes."""
    bar = model.endswith("dense")
    digests = chosen and not model.endswith(("streamed", "read otherwise than planned"))
    return get_model(
        model_config=ModelConfig(model=model, **settings),
        load_config=LoadConfig(
            cooperative=chosen, timeout=timeout, show_progress=bar, digests=digests
        ),
    )


def scenario(size: int, name: str = "") -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        @functools.wraps(function)
        def run(directory: Path, rank: int) -> Any:
            dist.init_process_group("gloo")
            dist.barrier()
            return function(directory, rank)

        SCENARIOS[name or function.__name__] = (size, run)
        return function

    return enter


def of_two(init: Any, memory: OfferedMemory, nbytes: int) -> None:
    """Let every two ranks be on a host of their own."""
    init(memory, nbytes)
    assert memory.offer is not None
    memory.offer = memory.offer._replace(host=str(int(os.environ["RANK"]) // 2))


def refused(*arguments: Any) -> None:
    raise OSError("refused by the test")


@contextlib.contextmanager
def instead(owner: Any, name: str, function: Any) -> Iterator[None]:
    # Several hosts, and memory that the system refuses, are not to be had in a test.
    right = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, right)


def same_as_alone(directory: Path, rank: int, names: Iterable[str]) -> dict[str, Any]:
    """Load cases together and alone; return what differs, and what was read, in elements."""
    size, result = dist.get_world_size(), {}
    for name in names:
        settings = CASES[name][1]
        url = f"counted://{directory.parent / f'case {name}'}"
        Counted.reads.clear()
        one = load(url, True, **settings).state_dict()
        reads = dict(Counted.reads)
        with tensor_parallel(rank=rank, size=size):
            other = load(url, False, **settings).state_dict()
        assert one.keys() == other.keys()
        differing = [
            path
            for path in one
            if not torch.equal(one[path].view(torch.uint8), other[path].view(torch.uint8))
        ]
        stored = open_checkpoint(directory.parent / f"case {name}").items()
        elements = {path: handle.shape.numel() for path, handle in stored}
        result[name] = {"differing": differing, "reads": reads, "elements": elements}
    return result


@scenario(3)
def same_at_3(directory: Path, rank: int) -> Any:
    return {"one host": same_as_alone(directory, rank, CASES)}


@scenario(4)
def same_at_4(directory: Path, rank: int) -> Any:
    right, few = OfferedMemory.__init__, ("one KV head", "whole experts")
    result = {"one host": same_as_alone(directory, rank, few)}
    with instead(OfferedMemory, "__init__", lambda *arguments: of_two(right, *arguments)):
        return result | {"two hosts": same_as_alone(directory, rank, few)}


@scenario(2)
def same_at_2(directory: Path, rank: int) -> Any:
    with instead(OfferedMemory, "_map", refused):
        names = ("dense", "read otherwise than planned")
        result = {"hosts of one": same_as_alone(directory, rank, names)}
    with instead(OfferedMemory, "join", refused) if rank else contextlib.nullcontext():
        return result | {"without memory": same_as_alone(directory, rank, ("dense",))}


def failing(action: Callable[[Path], Any], *, hosts: bool = False) -> Any:
    """Let rank 1 do something when it is to read its part of the fourth batch."""

    def run(directory: Path, rank: int) -> Any:
        read_part = SharedReader.read_part

        def read(self: Any, batch: int, buffer: torch.Tensor) -> None:
            if rank == 1 and batch == 3:
                action(directory)
            read_part(self, batch, buffer)

        # No signal from outside could be timed to one batch of many.
        SharedReader.read_part = read  # type: ignore[method-assign]
        if hosts:
            # Ranks that cannot map each other's memory are as on several hosts.
            OfferedMemory._map = refused  # type: ignore[assignment, method-assign]
        timeout = TIMEOUT if action is stop else PATIENCE
        load(str(directory.parent / "case dense"), True, timeout)
        return "loaded"

    return run


def fail(directory: Path) -> None:
    happens(directory)
    raise OSError("the disk is gone")


def interrupt(directory: Path) -> None:
    happens(directory)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()  # its part never comes


@scenario(3)
def planning_one_fails(directory: Path, rank: int) -> Any:
    """Let rank 1 fail before it has a plan, when the others wait for what it will read."""
    if rank == 1:
        Planner.plan = lambda planner, **_: fail(directory)  # type: ignore[assignment, method-assign]
    load(str(directory.parent / "case dense"), True)
    return "loaded"


scenario(3, "reading_one_dies")(failing(die))
scenario(2, "reading_one_fails")(failing(fail))
scenario(3, "reading_one_is_stopped")(failing(stop))
scenario(2, "reading_one_is_interrupted")(failing(interrupt))
scenario(3, "reading_one_dies_on_its_host")(failing(die, hosts=True))
scenario(2, "reading_one_is_stopped_on_its_host")(failing(stop, hosts=True))


@scenario(2)
def choosing(directory: Path, rank: int) -> Any:
    """Return what ranks read together that choose by themselves, and why they refused the rest."""
    folder, chosen = directory.parent / "case dense", []
    start = SharedRing.start

    def started(self: SharedRing, read: Any) -> None:
        chosen.append(url)
        start(self, read)

    # What was chosen shows in no result: the weights are the same either way.
    SharedRing.start = started  # type: ignore[method-assign]
    for url in (str(folder), f"counted://{folder}"):
        get_model(model_config=ModelConfig(model=url))
    SharedRing.start = start  # type: ignore[method-assign]
    refusals = [refusal(lambda: load(str(folder), rank == 0))]  # they disagree
    changed = directory / "model"
    if rank == 0:
        shutil.copytree(folder, changed)
    dist.barrier()

    def after_a_change(self: SharedRing, read: Any) -> None:
        os.utime(changed / "model.safetensors")
        start(self, read)

    SharedRing.start = after_a_change  # type: ignore[method-assign]
    refusals.append(refusal(lambda: load(str(changed), True)))
    return {"together": [each.partition("://")[0] for each in chosen], "refusals": refusals}


def refusal(work: Callable[[], Any]) -> list[str]:
    try:
        work()
    except (RankError, WeightReadError) as error:
        return [type(error).__name__, str(error)]
    return ["loaded", ""]

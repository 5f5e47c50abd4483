"""Scenarios of engines in a world of processes, for ``scenarios.py``."""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.base.process_groups import gather_objects
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.distributed import together
from vllm_module.errors import RankError
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.layout import TransferPlan, layout_of_shards, parse_layout, rows
from vllm_module.layout.layout_file import layout_json
from vllm_module.runtime.ranks import processes

working = runpy.run_path(str(Path(__file__).with_name("working_together.py")))
die, await_events, TIMEOUT = working["die"], working["await_events"], working["TIMEOUT"]
SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}
PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [170, 4]}]


def scenario(size: int) -> Callable[[Callable[[Path, int], Any]], Callable[[Path, int], Any]]:
    def enter(function: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
        SCENARIOS[function.__name__] = (size, function)
        return function

    return enter


def engine(directory: Path, checkpoint: str = "good", **settings: Any) -> LLM:
    folder = str(directory.parent / checkpoint)
    settings = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20, **settings}
    return LLM(folder, skip_tokenizer_init=True, **settings)


def tokens(llm: LLM, temperature: float = 0.0) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def added(rank: int) -> int:
    """Use torch's default group, as a trainer does."""
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return int(total)


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it raised nothing"


@scenario(2)
def engine_in_each_process(directory: Path, rank: int) -> Any:
    """Engines of one rank, made before, within and after the program's process group."""
    before = engine(directory, tensor_parallel_size=1)
    untouched = not dist.is_initialized()
    dist.init_process_group("gloo")
    within = engine(directory, distributed_executor_backend="external_launcher")
    sums = [added(rank)]
    sizes = [before.executor.size, within.executor.size]
    found = [tokens(before), tokens(within)]
    before.close()
    sums.append(added(rank))
    dist.destroy_process_group()
    after = engine(directory, distributed_executor_backend="uni")
    found += [tokens(within), tokens(after)]
    return untouched, sizes, sums, found


@scenario(4)
def engines_of_two_ranks(directory: Path, rank: int) -> Any:
    """A policy and a reference in each process, each of two ranks, closed in any order."""
    settings = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    policy = engine(directory, seed=None, **settings)
    untouched = not dist.is_initialized()
    dist.init_process_group("gloo")
    reference = engine(directory, "other values", **settings)
    found = {"policy": tokens(policy), "reference": tokens(reference)}
    drawn = tokens(policy, temperature=2.0)
    weights = load_file(directory.parent / "other values" / "model.safetensors")
    sums = [added(rank)]
    policy.update_weights(weights)
    found["updated"] = tokens(policy)
    same = policy.digest().differences(reference.digest())
    # What one rank refuses, no rank takes.
    refused = weights | {"model.norm.weight": torch.ones(7)} if rank % 2 else weights
    said = raised_by(lambda: reference.update_weights(refused))
    found["refused"] = tokens(reference)
    # Ranks would be asked one by one, or get requests in different steps.
    alone = [raised_by(reference.serve_weights), raised_by(lambda: AsyncLLM(reference))]
    dist.destroy_process_group()
    found["alone"] = tokens(reference)
    reference.close()
    found["last"] = tokens(policy)
    policy.close()
    place = policy.executor.rank, policy.executor.size
    return {
        "untouched": untouched, "place": place, "sums": sums, "tokens": found, "drawn": drawn,
        "differences": list(same), "said": said, "alone": alone,
    }  # fmt: skip


@scenario(4)
def trained_weights_move(directory: Path, rank: int) -> Any:
    """Two ranks with DTensor's shards send boxes to an engine of the two others, in place."""
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", [0, 1])
    kind = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    llm = engine(directory, **kind) if rank > 1 else None
    layouts = gather_objects(llm and layout_json(llm.layout()), None)
    target = parse_layout(layouts[2])
    assert layouts[2] == layouts[3]

    def box_of(name: str, shape: tuple[int, ...], at: int) -> Any:
        dim = (len(name) % 2) % len(shape)  # some tensors are cut by columns
        (first,), (count,) = rows((shape[dim],), at, 2)
        start = tuple(first if each == dim else 0 for each in range(len(shape)))
        return start, tuple(count if each == dim else n for each, n in enumerate(shape))

    source = layout_of_shards(target.tensors, 2, box_of)
    plan = TransferPlan(source, target)
    shards: dict[str, torch.Tensor] = {}
    if rank < 2:
        weights = load_file(directory.parent / "other values" / "model.safetensors")
        for name, tensor in weights.items():
            placed = distribute_tensor(tensor, mesh, [Shard(len(name) % 2 % tensor.dim())])
            shards[name] = placed.to_local()
    parts = {
        name: digest_box(shard, box_of(name, target.find(name)[0].shape, rank)[0], tuple(shape))
        for name, shard in shards.items()
        for shape in [target.find(name)[0].shape]
    }
    of_ranks = gather_objects(parts, None)
    digests = {name: (of_ranks[0][name] + of_ranks[1][name]).hex for name in of_ranks[0]}
    if llm is None:
        send_boxes(plan, source, shards, bucket_bytes=1 << 14)
        if rank == 1:  # a sender that dies in the next round is named
            die(directory)
        again = partial(send_boxes, plan, source, shards, bucket_bytes=1 << 14)
        return raised_by(lambda: together(again, timeout=TIMEOUT))
    before = tokens(llm)
    addresses = addresses_of(llm)
    arrived = receive_boxes(plan, bucket_bytes=1 << 14)
    llm.update_weights(arrived, digests=digests)
    same = addresses == addresses_of(llm)
    after = tokens(llm)
    arrived = receive_boxes(plan, bucket_bytes=1 << 14)
    said = raised_by(lambda: together(lambda: llm.update_weights(arrived), timeout=TIMEOUT))
    return {
        "before": before, "after": after, "same": same, "said": said, "last": tokens(llm),
        "sent": sum(plan.sent_bytes().values()),
    }  # fmt: skip


def addresses_of(llm: LLM) -> list[int]:
    return [parameter.data_ptr() for parameter in llm.executor.worker.model.parameters()]


@scenario(2)
def a_program_goes_on(directory: Path, rank: int) -> Any:
    """Without a word the world is one engine; a program with a process group loses no rank."""
    dist.init_process_group("gloo")
    llm = engine(directory)
    size = llm.executor.size
    found = raised_by(lambda: tokens(llm)) if rank else tokens(llm)
    llm.close()
    return size, found, added(rank)


@scenario(2)
def a_program_ends(directory: Path, rank: int) -> Any:
    """Without a word and without a process group, the other ranks exit when rank 0 closes."""
    try:
        with engine(directory) as llm:
            return tokens(llm)
    except SystemExit as end:
        return f"exit {end.code}"


@scenario(2)
def ranks_of_its_own(directory: Path, rank: int) -> Any:
    """Only one process of a world makes engines, which start their ranks and end in any order."""
    dist.init_process_group("gloo")
    if rank == 0:
        # Ranks that are started import PyTorch in 2 s each: these are forks of one process.
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(["vllm_module.runtime.ranks.worker"])
        module: Any = processes
        module.multiprocessing = SimpleNamespace(get_context=lambda _: forked)
        threads = torch.get_num_threads()
        settings = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
        policy = engine(directory, **settings)
        reference = engine(directory, "other values", **settings)
        found = [tokens(policy), tokens(reference)]
        policy.close()
        found.append(tokens(reference))
        reference.close()
        assert torch.get_num_threads() == threads
    return (added(rank), found if rank == 0 else [])


@scenario(3)
def sizes_that_do_not_fit(directory: Path, rank: int) -> Any:
    """What cannot be is refused in every process, by its numbers, and nothing waits."""
    external = {"distributed_executor_backend": "external_launcher"}
    calls: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, **external},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "slurm"},
    ]
    return [raised_by(lambda settings=call: engine(directory, **settings)) for call in calls]


@scenario(2)
def a_rank_of_an_engine_dies(directory: Path, rank: int) -> Any:
    """The other rank of an engine that every process calls does not wait for it."""
    settings = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    llm = engine(directory, **settings)
    tokens(llm)
    if rank:
        die(directory)
    await_events(directory)
    try:
        tokens(llm)
    except RankError:
        llm.close()
        raise
    return "it raised nothing"

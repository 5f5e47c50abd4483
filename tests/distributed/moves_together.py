"""Weights of four ranks of a trainer go to four of an engine: ``moves_together.py DIRECTORY``.

Each of the eight is a process. They go through the cases of ``cases()``, one after another: a
family, how the trainer's ranks share its weights, and how the engine's do. A rank writes what it
has seen to ``DIRECTORY/rank<R>.json``, by case.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import runpy
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vllm_module import QuantizationConfig
from vllm_module.build import registry
from vllm_module.build.model_source import build_model
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import expert_parallel, pipeline_parallel, tensor_parallel
from vllm_module.hf_config import parse_config
from vllm_module.layout import (
    Layout,
    StoredTensorLayout,
    TransferPlan,
    layout_of_shards,
    layout_of_stages,
    layout_of_state_dict,
    parse_layout,
    rows,
)
from vllm_module.layout.layout_file import layout_json
from vllm_module.quantization import rules_for
from vllm_module.testing import poisoned_memory, random_weights
from vllm_module.testing.checkpoints import same_bits, state

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))
MACHINE = runpy.run_path(str(HERE.parent / "bench" / "machine.py"))
CONFIGS = runpy.run_path(str(HERE.parent / "models" / "configurations.py"))["CONFIGS"]
RANKS = 4  # of each side
BUCKET = 1 << 14  # bytes; models have some hundred thousand
LIMIT = 300.0  # seconds of a message, on a busy machine
INT4 = "int4_per_group"
M_MMAP_THRESHOLD = -3  # of malloc.h
HEAD = 32  # bytes that say what comes

# Sizes that 4 ranks can share, where the small ones cannot.
CHANGED: dict[str, dict[str, Any]] = {
    "gpt-oss": {"num_local_experts": 4},
    "qwen3-next": {"num_experts": 8},
}
DENSE = "llama", "qwen3", "phi3", "gemma2", "gemma3", "mamba2", "qwen2", "starcoder2"
EXPERTS = "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-next", "olmoe"


class Move(NamedTuple):
    """How the trainer's ranks share weights, and the engine's, which may quantize them."""

    family: str
    source: str
    target: str
    scheme: str | None = None

    def __str__(self) -> str:
        scheme = f", {self.scheme}" if self.scheme else ""
        return f"{self.family}: {self.source} to {self.target}{scheme}"


def cases() -> list[Move]:
    """Return every family from every source to every target; without ``AT_LENGTH``, some."""
    every = [
        Move(family, source, target)
        for families, more in ((DENSE, ()), (EXPERTS, ("EP",)))
        for family in families
        for source in ("FSDP", "TP", *more, "PP")
        for target in ("TP", *more)
    ]
    quantized = [
        Move(family, source, target, scheme)
        for scheme in ("fp8_per_channel", "fp8_per_tensor", INT4)
        for family, source, target in (("llama", "FSDP", "TP"), ("mixtral", "EP", "EP"))
    ]
    if "AT_LENGTH" in os.environ:
        return every + quantized
    some = {
        ("llama", "FSDP", "TP"), ("phi3", "PP", "TP"), ("mamba2", "FSDP", "TP"),
        ("mixtral", "EP", "TP"), ("deepseek-v3", "PP", "EP"), ("gpt-oss", "TP", "EP"),
        ("qwen3-next", "EP", "TP"),
    }  # fmt: skip
    return [each for each in every if each[:3] in some] + [quantized[0], quantized[-1]]


def write_configurations(file: Path) -> dict[str, str]:
    """Write config.json of each family for ``config_of``; return the variable that names the file.

    Tests call it: to import transformers takes 2 s, and they have.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for family in DENSE + EXPERTS:
        entries = CONFIGS[family] | CHANGED.get(family, {})
        cls = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[entries["model_type"]]
        made = json.loads(AutoConfig.for_model(**entries).to_json_string(use_diff=False))
        found[family] = made | {"architectures": [cls]}
    file.write_text(json.dumps(found))
    return {"CONFIGURATIONS": str(file)}


def config_of(family: str) -> Any:
    entries = json.loads(Path(os.environ["CONFIGURATIONS"]).read_text())[family]
    return parse_config(
        registry.config_class(entries["architectures"]), entries, Path("config.json")
    )


def build(config: Any, scheme: str | None, *places: Any) -> vLLMModule:
    """Build the model of a rank, which has its places in what ranks share."""
    asked = QuantizationConfig(scheme=scheme, group_size=8) if scheme == INT4 else scheme
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(place)
        return build_model(config, torch.bfloat16, torch.device("cpu"), rules_for(asked, None))


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Sent:
    """What the transport is given for each rank, and what the kernel has sent on its connections.

    The connections are those of a group that carries nothing else.
    """

    def __init__(self) -> None:
        before = {*_connections()}
        self.group = dist.new_group(list(range(2 * RANKS)))
        dist.barrier(self.group)
        mine = {places: found for found, places in _connections() if (found, places) not in before}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [*mine])
        self._connections = {
            rank: mine[here, there]
            for rank, others in enumerate(every)
            for there, here in others
            if (here, there) in mine
        }
        self.given: list[tuple[int, int]] = []
        isend = dist.isend

        def counted(tensor: torch.Tensor, *, group_dst: int, **more: Any) -> Any:
            self.given.append((group_dst, tensor.nbytes))
            return isend(tensor, group_dst=group_dst, **more)

        # Nothing of ours says what the transport is given, so its function is replaced.
        dist.isend = counted

    def by_kernel(self) -> dict[int, int]:
        """Return the bytes that the kernel has sent to each rank since the connection was made."""
        sent = {}
        for rank, descriptor in self._connections.items():
            with socket.socket(fileno=os.dup(descriptor)) as each:
                # struct tcp_info has 64 bits of tcpi_bytes_sent there, since Linux 4.19.
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent[rank] = struct.unpack_from("Q", info, 200)[0]
        return sent


def _connections() -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield each connection of this process: its descriptor, and the addresses of both ends."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.type == socket.SOCK_STREAM and each.family != socket.AF_UNIX:
                    yield int(name), (each.getsockname(), each.getpeername())
        except OSError:  # no socket, or one that is not connected
            continue


def on_source(
    move: Move, config: Any, rank: int, weights: Mapping[str, torch.Tensor]
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Return the layout of the trainer's ranks, and what this one holds of ``weights``."""
    if move.source == "FSDP":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh("cpu", list(range(RANKS)))
        shards: dict[str, torch.Tensor] = {
            name: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None)
            for name, each in weights.items()
        }
        return layout_of_state_dict(shards, mesh.get_group()), shards
    if move.source == "PP":
        stage, own = divmod(rank, 2)
        stages = [
            build(
                config, None, pipeline_parallel(rank=at, size=2), tensor_parallel(rank=of, size=2)
            )
            for at, of in ((0, 0), (1, 0), (stage, own))
        ]
        layouts = [each.plan_weights(weights).layout(2) for each in stages[:2]]
        stages[2].load_weights(weights)
        return layout_of_stages(layouts), held(stages[2])
    experts = [expert_parallel()] if move.source == "EP" else []
    model = build(config, None, tensor_parallel(rank=rank, size=RANKS), *experts)
    model.load_weights(weights)
    return model.plan_weights(weights).layout(RANKS), held(model)


def carry_out(move: Move, config: Any, engines: Any, sent: Sent) -> dict[str, Any]:
    rank, is_engine = dist.get_rank() % RANKS, dist.get_rank() >= RANKS
    names = build(config, None, tensor_parallel(rank=0, size=1)).expected_weights()
    old, new = (random_weights(names, seed=seed) for seed in (1, 2))
    shown: list[Any] = [None]
    model: Any = None
    if is_engine:
        experts = [expert_parallel] if move.target == "EP" else []

        def loaded(weights: Any) -> vLLMModule:
            places = tensor_parallel(group=engines), *(each() for each in experts)
            model = build(config, move.scheme, *places)
            model.load_weights(weights)
            return model

        model = loaded(old)
        plan_of_load = model.plan_weights(new)
        shown = [layout_json(plan_of_load.layout())]
    dist.broadcast_object_list(shown, src=RANKS)
    target = parse_layout(shown[0])
    layout, tensors = on_source(move, config, rank, new) if not is_engine else (None, {})
    shared = [layout_json(layout) if layout is not None else None]
    dist.broadcast_object_list(shared, src=0)
    source = parse_layout(shared[0])
    plan = TransferPlan(source, target)
    options: dict[str, Any] = {"group": sent.group, "bucket_bytes": BUCKET, "timeout": LIMIT}
    sent.given.clear()
    before = sent.by_kernel()
    dist.barrier()
    note: dict[str, Any] = {}
    if is_engine:
        addresses = {path: each.data_ptr() for path, each in held(model).items()}
        model.update_weights(receive_boxes(plan, **options))
        moved = {p for p, each in held(model).items() if addresses.get(p) != each.data_ptr()}
        got, expected, earlier = (state(each) for each in (model, loaded(new), loaded(old)))
        note = {
            "moved": sorted(moved),
            "wrong": [path for path in expected if not same_bits(got[path], expected[path])],
            "unlike": sum(not same_bits(got[path], earlier[path]) for path in expected),
            "parameters": len(expected),
            "comes": sum(n for (_, to), n in plan.sent_bytes().items() if to == rank),
            "kept": sum(read.nbytes for read in plan_of_load.reads()),
        }
    else:
        send_boxes(plan, source, tensors, **options)
        counts, given = Counter[int](), Counter[int]()
        for to, nbytes in sent.given:
            counts[to - RANKS] += 1
            given[to - RANKS] += nbytes
        note["planned"] = {to: n for (of, to), n in plan.sent_bytes().items() if of == rank}
        note["messages"] = {to: number // 2 for to, number in counts.items()}
        note["given"] = {to: given[to] - HEAD * (counts[to] // 2) for to in given}
    dist.barrier()
    after = sent.by_kernel()
    note["kernel"] = {to: after[to] - before[to] for to in after}
    return note


def take_memory(sent: Sent) -> dict[str, int]:
    """Return the memory that moving large tensors takes at most, and what moves of a batch.

    Rows of the trainer's ranks go to columns of the engine's. Rows of a column are whole pages.
    """
    shape, number = (1024, RANKS * mmap.PAGESIZE // 4), 8
    nbytes = shape[0] * shape[1] * 4
    entries = [StoredTensorLayout(f"w{at}", shape, "float32", f"w{at}", 0) for at in range(number)]
    columns = [((0, at * shape[1] // RANKS), (shape[0], shape[1] // RANKS)) for at in range(RANKS)]
    source = layout_of_shards(entries, RANKS, lambda _, shape, at: rows(shape, at, RANKS))
    plan = TransferPlan(source, layout_of_shards(entries, RANKS, lambda _, __, at: columns[at]))
    options: dict[str, Any] = {"group": sent.group, "bucket_bytes": 2 * nbytes, "timeout": LIMIT}
    # Memory that is freed goes back to the system, and is counted no more.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    tensors = {each.name: torch.ones(shape[0] // RANKS, shape[1]) for each in entries}
    dist.barrier()
    peak = MACHINE["memory_peak"]()
    if dist.get_rank() < RANKS:
        send_boxes(plan, source, tensors, **options)
    else:
        for _, tensor in receive_boxes(plan, **options):
            assert tensor.shape == shape
            del tensor
    return {"peak": peak(), "batch": 2 * nbytes // RANKS, "tensor": nbytes}


def main(directory: Path) -> None:
    import torch.distributed.tensor  # not where tests only ask which cases there are

    torch.set_num_threads(1)
    moves = cases()
    configs = {family: config_of(family) for family in dict.fromkeys(each.family for each in moves)}

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        engines = dist.new_group(list(range(RANKS, 2 * RANKS)))
        sent = Sent()
        notes = {}
        for move in moves:
            try:
                with poisoned_memory():
                    notes[str(move)] = carry_out(move, configs[move.family], engines, sent)
            except Exception as error:
                raise RuntimeError(str(move)) from error
        notes["memory"] = take_memory(sent)
        (directory / f"rank{rank}.json").write_text(json.dumps(notes))
        dist.destroy_process_group()

    pids = SUPPORT["fork_ranks"](2 * RANKS, work, port=SUPPORT["free_port"]())
    sys.exit(max(map(abs, SUPPORT["exit_codes"](pids))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

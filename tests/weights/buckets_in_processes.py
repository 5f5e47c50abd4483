"""Weights pushed by a trainer into ranks that run; ``buckets_in_processes.py DIRECTORY``.

One trainer (rank 0) and two ranks that share a model go through all cases in one group, one after
another, and then, in groups of their own, those in which a rank is killed.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import runpy
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vllm_module import vLLMModule
from vllm_module.base import shared_memory
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ModelNotReadyError
from vllm_module.layers import MergedColumnParallelLinear, RMSNorm, RowParallelLinear
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.weights import buckets, open_checkpoint, receive_weights, send_weights

SIZE = 3
TIMEOUT = 3600.0  # of the groups, in seconds: a rank that waits that long is killed first
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
# Groups that break. Of four ranks, one is no neighbour of the dead one in gloo's rings.
BROKEN = {"trainer killed": 4, "receiver killed": 4, "receiver interrupted": 3}
KILLED = 2  # of them
PAIRS = {f"t{i}": torch.full((3,), float(i)) for i in range(6)}  # a bucket of 48 bytes holds three
STRANGE = {
    "silent": ValueError(),
    "terminal": ValueError("\x1b[2J\x00 and \r\n a lone \ud800"),
    "long": ValueError("line\n" * 10_000),
    "stop": StopIteration("inside"),
    "interrupt": KeyboardInterrupt("inside"),
}


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError


class Model(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)
        self.gate_up_proj = MergedColumnParallelLinear(
            8, [12, 20], bias=True, shard_names=["gate_proj", "up_proj"]
        )
        # Full precision arrives, and is quantized in place.
        self.gate_up_proj.quantize(EightBitMethod(ONLINE["fp8_per_tensor"]))
        self.down_proj = RowParallelLinear(32, 8, params_dtype=torch.bfloat16)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expected = Model().expected_weights()
    return {
        name: torch.rand(meta.shape, generator=generator, dtype=torch.float32).to(meta.dtype)
        for name, meta in expected.items()
    }


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """View random bytes as every dtype that torch copies, with many shapes and strides."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randint(0, 256, (6, 96), dtype=torch.uint8, generator=generator)
    names = "bfloat16 float16 float32 float64 float8_e4m3fn float8_e5m2 float8_e8m0fnu complex64"
    names += " complex128 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn_x2"
    found = {name: matrix.view(getattr(torch, name)) for name in names.split()}
    found["bool"] = matrix > 127
    for name, tensor in list(found.items()):
        found |= {
            f"{name} transposed": tensor.t(),
            f"{name} in steps": tensor[::2, 1::3],
            f"{name} scalar": tensor[0, 0],
            f"{name} empty": tensor[:0],
            f"{name} expanded": tensor[0].expand(2, 3, -1),
        }
    found["conjugate"] = torch.view_as_complex(torch.rand(3, 2, generator=generator)).conj()
    found["a name \ud800\n"] = torch.rand(3, generator=generator)
    found["parameter"] = torch.nn.Parameter(torch.rand(3, generator=generator))
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(as_bytes(one), as_bytes(other))
    )


class Rank:
    """One of the processes: rank 0 sends, the others receive and share a model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = dist.get_rank()
        self.sharers = dist.new_group([1, 2])
        self.cases: dict[str, Callable[[], Any]] = {}
        with tensor_parallel(rank=0, size=1):
            self.new = weights(7)
            old = weights(3)
        if self.number:
            with tensor_parallel(group=self.sharers):
                self.model, self.fresh = Model(), Model()
            self.fresh.load_weights(self.new)
            self.old = old
        for name in dir(self):
            if name.startswith("case_"):
                self.cases[name[5:].replace("_", " ")] = getattr(self, name)
        for size in (1, 100, 1 << 20):
            for seed in range(4):
                self.cases[f"bits {size} {seed}"] = lambda s=size, o=seed: self.update(s, o)
        for kind in (*STRANGE, "unprintable"):
            self.cases[f"strange {kind} sent"] = lambda k=kind: self.strange(k, 0)
            self.cases[f"strange {kind} received"] = lambda k=kind: self.strange(k, 2)
        for count in (0, 1, 2):
            self.cases[f"sender fails after {count}"] = lambda c=count: self.sender_fails(c)
        for bucket in (1, 2):
            for mistake in ("refuses", "leaves"):
                for who in (1, 2):
                    self.cases[f"{who} {mistake} in bucket {bucket}"] = (
                        lambda m=mistake, w=who, b=bucket: self.receiver_stops(m, w, 3 * b - 2)
                    )
        self.cases["last in step"] = lambda: self.update(100, 0)

    def send(self, pairs: Any, bucket_bytes: Any = 48) -> None:
        send_weights(pairs, bucket_bytes=bucket_bytes)

    def collect(self) -> dict[str, torch.Tensor]:
        with receive_weights(src=0) as pairs:
            return {name: tensor.clone() for name, tensor in pairs}

    def load_old(self) -> dict[str, int]:
        self.model.load_weights(self.old)
        assert not self.is_new()
        return {name: tensor.data_ptr() for name, tensor in self.model.state_dict().items()}

    def is_new(self) -> bool:
        state, fresh = self.model.state_dict(), self.fresh.state_dict()
        return state.keys() == fresh.keys() and all(same(state[k], fresh[k]) for k in fresh)

    def can_run(self) -> bool:
        try:
            self.model.check_ready()
        except ModelNotReadyError:
            return False
        return True

    def update(self, bucket_bytes: int, seed: int, pairs: Any = None) -> Any:
        if self.number == 0:
            pairs = list((pairs or self.new).items())
            random.Random(seed).shuffle(pairs)
            return send_weights(iter(pairs), bucket_bytes=bucket_bytes)
        where = self.load_old()
        with receive_weights(src=0) as received:
            self.model.update_weights(received)
        now = {name: tensor.data_ptr() for name, tensor in self.model.state_dict().items()}
        return {"new": self.is_new(), "stayed": now == where, "runs": self.can_run()}

    def case_from_a_file(self) -> Any:
        if self.number:
            return self.update(0, 0)
        with open_checkpoint(self.directory / "checkpoint") as checkpoint:
            return self.update(200, 0, dict(checkpoint))

    def case_two_rounds(self) -> Any:
        pairs = list(self.new.items())
        if self.number == 0:
            self.send(pairs[:3])
            return self.send(pairs[3:])
        self.load_old()
        filled, was_new = [], []
        for _ in range(2):
            with receive_weights(src=0) as received:
                filled.append(len(self.model.update_weights(received)))
            was_new.append(self.is_new())
        return {"filled": filled, "new": was_new}

    def case_all_kinds(self) -> Any:
        kinds = tensors_of_all_kinds()
        if self.number == 0:
            for bucket_bytes in (1, 700, 1 << 20):
                send_weights(kinds, bucket_bytes=bucket_bytes)
            return None
        wrong = []
        for _ in range(3):
            received = self.collect()
            assert list(received) == list(kinds)
            wrong += [name for name, tensor in kinds.items() if not same(tensor, received[name])]
        return {"wrong": wrong, "count": len(kinds)}

    def case_kinds_on_two_hosts(self) -> Any:
        with self.apart():
            return self.case_all_kinds()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let the last rank be on another host, as far as memory is shared."""
        if self.number == 2:
            shared_memory.host_name = lambda: "another"  # type: ignore[assignment]
        try:
            yield
        finally:
            shared_memory.host_name = HOST_NAME

    @contextmanager
    def without_offers(self, number: int) -> Iterator[None]:
        """Let the system of one rank have no memory that it could share."""

        def refused(*_: Any) -> int:
            raise OSError("of this host")

        if self.number == number:
            os.memfd_create = refused  # type: ignore[assignment]
        try:
            yield
        finally:
            os.memfd_create = MEMFD_CREATE

    def case_kinds_of_one_without_offers(self) -> Any:
        with self.without_offers(0):
            return self.case_all_kinds()

    def case_kinds_for_one_without_offers(self) -> Any:
        with self.without_offers(2):
            return self.case_all_kinds()

    def case_kinds_with_digests(self) -> Any:
        kinds = tensors_of_all_kinds()
        if self.number == 0:
            return send_weights(kinds, bucket_bytes=700, digests=True)
        received = self.collect()
        return [name for name, tensor in kinds.items() if not same(tensor, received[name])]

    def case_damaged_on_the_way(self) -> Any:
        with self.apart():  # or the others would have the damaged bucket, too
            return self.damaged_on_the_way()

    def damaged_on_the_way(self) -> Any:
        if self.number == 0:
            return send_weights(PAIRS, bucket_bytes=48, digests=True)
        carry = buckets._Transfer.carry

        def damaged(transfer: Any, coming: Any) -> None:
            carry(transfer, coming)
            if self.number == 2:
                transfer.bucket.current[19] ^= 64  # of the second tensor of each bucket

        buckets._Transfer.carry = damaged  # type: ignore[method-assign]
        try:
            return list(self.collect())
        finally:
            buckets._Transfer.carry = carry  # type: ignore[method-assign]

    def case_two_memories(self) -> Any:
        return self.memories()

    def case_one_memory(self) -> Any:
        with self.apart():
            return self.memories()

    def memories(self) -> Any:
        made: list[weakref.ref[torch.Tensor]] = []
        alive: list[int] = []  # of the tensors made before, when the next is made

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for i in range(9):
                alive.append(sum(each() is not None for each in made))
                tensor = torch.ones(12) * i
                made.append(weakref.ref(tensor))
                yield f"t{i}", tensor
                del tensor

        if self.number == 0:
            self.send(source())
            return {"alive": alive}
        with receive_weights(src=0) as pairs:
            kept = [tensor for _, tensor in pairs]
        return {"places": len({tensor.data_ptr() for tensor in kept}), "first": kept[0].tolist()}

    def case_nothing(self) -> Any:
        if self.number == 0:
            for nothing in ({}, [], iter(())):
                self.send(nothing)
            return self.send({"empty": torch.empty(0, 3)})
        with receive_weights(src=0):
            pass
        return [len(self.collect()) for _ in range(3)]

    def case_takes_all_and_asks_no_more(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0) as pairs:
            return [next(pairs)[0] for _ in PAIRS]

    def strange(self, kind: str, who: int) -> Any:
        error = STRANGE.get(kind) or UnprintableError()

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from PAIRS.items()
            raise error

        if self.number == 0:
            return self.send(PAIRS if who else broken())
        with receive_weights(src=0) as pairs:
            first = next(pairs)[0]
            if self.number == who:
                raise error
            return [first, *(name for name, _ in pairs)]

    def sender_fails(self, count: int) -> Any:
        pairs = list(self.new.items())

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from pairs[:count]
            raise OSError(f"the optimizer lost {pairs[count][0]}")

        if self.number == 0:
            return self.send(broken(), 1)
        self.load_old()
        try:
            with receive_weights(src=0) as pairs:
                self.model.update_weights(pairs)
        finally:
            self.note = {"runs": self.can_run()}

    def receiver_stops(self, how: str, who: int, taken: int) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0) as pairs:
            for count, (name, _) in enumerate(pairs, 1):
                if self.number == who and count == taken:
                    if how == "leaves":
                        break
                    raise LookupError(f"{name} is not wanted")
        return None

    def case_model_refuses(self) -> Any:
        if self.number == 0:
            return self.send({**self.new, "norm.scale": torch.ones(8)}, 1)
        self.load_old()
        try:
            with receive_weights(src=0) as pairs:
                if self.number == 2:
                    pairs = ((k, v) for k, v in pairs if k != "norm.scale")
                self.model.update_weights(pairs)
        finally:
            self.note = {"runs": self.can_run(), "new": self.is_new()}

    def case_model_refuses_midway(self) -> Any:
        if self.number == 0:
            return self.send(self.new, 1)
        self.load_old()
        try:
            with receive_weights(src=0) as pairs:
                for count, (name, tensor) in enumerate(pairs):
                    if self.number == 1 and count == 2:
                        raise OverflowError(name)
                    self.model.update_weights(iter([(name, tensor)]))
        finally:
            self.note = {"new": self.is_new()}

    def case_closed_early(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0) as pairs:
            if self.number == 1:
                next(pairs)
                pairs.close()  # type: ignore[attr-defined]
            return [name for name, _ in pairs]

    def case_failure_swallowed(self) -> Any:
        if self.number == 0:
            return self.send(iter([("a", torch.ones(1)), ("b", "no tensor")]))
        with receive_weights(src=0) as pairs:
            try:
                list(pairs)
            except Exception as error:
                self.note = {"swallowed": type(error).__name__}

    def case_used_too_late(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        kept = None
        try:
            with receive_weights(src=0) as kept:
                next(kept)
                if self.number == 1:
                    raise LookupError
                list(kept)
        except Exception:
            return next(kept)

    def case_two_fail(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0):
            raise LookupError(f"of {self.number}")

    def case_all_fail(self) -> Any:
        if self.number == 0:
            return self.send([("a", torch.ones(1)), ("b", "no tensor")])
        with receive_weights(src=0):
            raise LookupError(f"of {self.number}")

    def case_cannot_be_packed(self) -> Any:
        if self.number == 0:
            return self.send({"x": torch.ones(2), "m": torch.empty(3, device="meta")})
        return list(self.collect())

    def case_bucket_of_nothing(self) -> Any:
        return self.collect() if self.number else self.send(PAIRS, 0)

    def case_name_no_text(self) -> Any:
        return self.collect() if self.number else self.send({3: torch.ones(1)})

    def case_no_shared_memory(self) -> Any:
        def refused(*_: Any) -> Any:
            raise OSError("of this host")

        mapped = mmap.mmap
        if self.number == 2:
            mmap.mmap = refused  # type: ignore[assignment,misc]
        try:
            return self.collect() if self.number else self.send(PAIRS)
        finally:
            mmap.mmap = mapped  # type: ignore[misc]

    def case_no_memory(self) -> Any:
        with self.apart():
            return self.no_memory()

    def no_memory(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0) as pairs:
            if self.number == 2:
                torch.empty = no_memory  # type: ignore[assignment]
            try:
                return [name for name, _ in pairs]
            finally:
                torch.empty = EMPTY  # type: ignore[assignment]

    def case_two_send(self) -> Any:
        return self.collect() if self.number == 1 else self.send(PAIRS)

    def case_nobody_sends(self) -> Any:
        return self.collect()

    def case_another_source(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=self.number - 1) as pairs:
            return list(pairs)

    def case_source_zero(self) -> Any:
        if self.number == 2:
            return self.send(PAIRS)
        with receive_weights(src=0 if self.number else 2) as pairs:
            return list(pairs)

    def case_another_device(self) -> Any:
        if self.number == 0:
            return self.send(PAIRS)
        with receive_weights(src=0, device="meta" if self.number == 2 else None) as pairs:
            return list(pairs)

    def case_subgroup(self) -> Any:
        if self.number == 0:
            return None
        if self.number == 2:
            send_weights(PAIRS, group=self.sharers)
            return send_weights(PAIRS, group=self.sharers)
        with receive_weights(src=1, group=self.sharers) as pairs:
            self.note["names"] = list(dict(pairs))
        with receive_weights(src=2, group=self.sharers) as pairs:  # its number in the world
            return len(dict(pairs))

    def run_all(self) -> None:
        for name, case in self.cases.items():
            self.note: dict[str, Any] = {}
            file = self.directory / f"{name}.{self.number}"
            try:
                self.note["returned"] = case()
            except BaseException as error:
                write(file, self.note, error)
            else:
                write(file, self.note)
        for error in STRANGE.values():
            error.__traceback__ = None  # in which are views of a bucket
        gc.collect()
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        offered = [link for link in links if link.startswith("/memfd:vllm-module")]
        write(self.directory / f"offered at the end.{self.number}", {"returned": offered})


def write(file: Path, note: dict[str, Any], error: BaseException | None = None) -> None:
    if error is not None:
        note["raised"] = type(error).__name__
        note["message"] = "" if isinstance(error, UnprintableError) else str(error)
        note["ranks"] = list(getattr(error, "ranks", ()))
        note["cause"] = type(error.__cause__).__name__
    file.write_text(json.dumps(note, default=repr))


EMPTY = torch.empty
HOST_NAME = shared_memory.host_name
MEMFD_CREATE = os.memfd_create


def no_memory(*size: Any, **options: Any) -> torch.Tensor:
    if size == (48,):
        raise torch.OutOfMemoryError("of this device")
    return EMPTY(*size, **options)


def break_off(directory: Path, name: str, number: int) -> None:
    """Kill or interrupt a rank while weights are sent; the others stay until all have raised."""
    # A shell has its background jobs ignore SIGINT, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    event = directory / f"{name}.event"
    gather = buckets.gather_objects

    def happen(what: signal.Signals) -> None:
        if what == signal.SIGKILL:
            event.touch()
        os.kill(os.getpid(), what)
        event.touch()

    def interrupted(*arguments: Any) -> list[Any]:
        threading.Thread(target=happen, args=[signal.SIGINT]).start()
        return gather(*arguments)

    def pairs_and_end() -> Iterator[tuple[str, torch.Tensor]]:
        yield from PAIRS.items()
        if name == "trainer killed":
            happen(signal.SIGKILL)
        # Receivers wait for the last bucket meanwhile.
        SUPPORT["wait_until"](event.exists, "a rank breaks off")

    try:
        if number == 0:
            send_weights(pairs_and_end(), bucket_bytes=48)
        else:
            with receive_weights(src=0) as pairs:
                for tensor_name, _ in pairs:
                    if number == 1 and name == "receiver killed":
                        happen(signal.SIGKILL)
                    if number == 1 and name == "receiver interrupted" and tensor_name == "t2":
                        buckets.gather_objects = interrupted  # type: ignore[attr-defined]
    except BaseException as error:
        write(directory / f"{name}.{number}", {}, error)

        def all_have_raised() -> bool:
            return len(list(directory.glob(f"{name}.[0-3]"))) == 3

        SUPPORT["wait_until"](all_have_raised, "three ranks raise")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # in ranks as well
    with tensor_parallel(rank=0, size=1):
        (directory / "checkpoint").mkdir()
        save_file(weights(7), directory / "checkpoint/model.safetensors")

    def run(name: str, rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        if name in BROKEN:
            break_off(directory, name, rank)
        else:
            Rank(directory).run_all()
            dist.destroy_process_group()

    pids = []
    for name, size in {"all": SIZE, **BROKEN}.items():
        pids += SUPPORT["fork_ranks"](size, partial(run, name), port=SUPPORT["free_port"]())
    killed = SUPPORT["exit_codes"](pids)
    assert sorted(killed) == [-signal.SIGKILL] * KILLED + [0] * (len(pids) - KILLED), killed


if __name__ == "__main__":
    main(Path(sys.argv[1]))

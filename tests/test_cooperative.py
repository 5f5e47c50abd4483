"""Ranks that read one checkpoint together keep the bits that each would read by itself."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module.base.shared_memory import Offer, OfferedMemory
from vllm_module.cooperative import Cooperation
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import WeightReadError
from vllm_module.parameters import FlattenedParameter
from vllm_module.parameters.dim import Dim
from vllm_module.weights.checkpoint import open_checkpoint
from vllm_module.weights.pairs import PairsCheckpoint

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE / "support.py"))
COOPERATING = runpy.run_path(str(HERE / "laws" / "cooperating.py"))
AGAIN = {"streamed", "read otherwise than planned", "tied and stored twice"}
LAYER = "model.layers.0"
NORMS = {  # what every rank keeps whole
    "model.norm.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.post_attention_layernorm.weight",
}
SOURCE = Path("a source")
MARGIN = 60.0  # seconds that a busy machine may take besides

SAME = ("same_at_2", "same_at_3", "same_at_4")
FAILURES = {  # of rank 1, and what the others say of it
    "planning_one_fails": "rank 1 of 3 failed: OSError: the disk is gone",
    "reading_one_dies": "rank 1 of 3 ended, or left",
    "reading_one_fails": "rank 1 of 2 failed: OSError: the disk is gone",
    "reading_one_is_stopped": "rank 1 of 3 passed nothing on for 5 s: it hangs, or",
    "reading_one_is_interrupted": "rank 1 of 2 failed: KeyboardInterrupt",
    "reading_one_dies_on_its_host": "rank 1 of 3 ended, or left",
    "reading_one_is_stopped_on_its_host": "rank 1 of 2 passed nothing on for 5 s: it hangs, or",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the scenarios, each rank of each in a process of its own."""

    def run(directory: Path) -> None:
        script = [sys.executable, str(HERE / "distributed" / "scenarios.py"), str(directory)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*script, "reading_together.py"]
        subprocess.run(command, check=True, timeout=6 * SUPPORT["LIMIT"], env=environment)

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "reading", run)
    return directory


def notes(folder: Path) -> dict[int, dict[str, Any]]:
    return {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text())
        for path in folder.glob("rank*.json")
    }


@pytest.mark.parametrize("scenario", SAME)
def test_processes_load_the_same_bits(directory: Path, scenario: str) -> None:
    """Every parameter is what the rank loads by itself, whatever reads it."""
    codes = json.loads((directory / scenario / "codes.json").read_text())
    assert set(codes.values()) == {0}
    for rank, note in notes(directory / scenario).items():
        for hosts, cases in note["returned"].items():
            for case, result in cases.items():
                assert result["differing"] == [], (hosts, case, rank)


@pytest.mark.parametrize("scenario", SAME)
def test_processes_read_each_element_once(directory: Path, scenario: str) -> None:
    """All ranks together read the checkpoint once, but for what a model reads otherwise."""
    results = [note["returned"] for note in notes(directory / scenario).values()]
    for hosts, cases in results[0].items():
        for case in cases.keys() - AGAIN:
            of_ranks = [result[hosts][case] for result in results]
            reads = sum((Counter(each["reads"]) for each in of_ranks), Counter[str]())
            once = of_ranks[0]["elements"]
            if hosts == "without memory":
                assert {name for name in reads if reads[name] > once[name]} == NORMS
            else:
                assert reads == once, (hosts, case)


@pytest.mark.parametrize("scenario", FAILURES)
def test_ranks_name_the_one_that_fails_in_mid_exchange(directory: Path, scenario: str) -> None:
    """No rank returns a model, and every survivor names the rank that failed."""
    (event,) = (directory / scenario).glob("event.*")
    survivors = {rank: note for rank, note in notes(directory / scenario).items() if rank != 1}
    assert survivors
    for note in survivors.values():
        assert (note["raised"], note["ranks"]) == ("RankError", [1]), note
        assert FAILURES[scenario] in note["message"]
        assert note["at"] - float(event.read_text()) < MARGIN
    assert 0 not in json.loads((directory / scenario / "codes.json").read_text()).values()


def test_ranks_choose_alike(directory: Path) -> None:
    """Local files on one host are read by each rank, a source together; ranks must agree."""
    for note in notes(directory / "choosing").values():
        assert note["returned"]["together"] == ["counted"]
        raised, message = note["returned"]["refusals"][0]
        assert raised == "RankError"
        assert "LoadConfig(cooperative=...): True on rank 0; False on rank 1" in message


def test_a_file_that_changes_is_refused(directory: Path) -> None:
    """No rank returns a model of a file that was written to while it was read."""
    for note in notes(directory / "choosing").values():
        raised, message = note["returned"]["refusals"][1]
        assert raised in ("WeightReadError", "RankError")
        assert "was changed since it was opened" in message


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux only")
def test_shared_memory_has_no_name() -> None:
    """Nothing is left in any file system, however a process ends; a stale offer is not taken."""
    one, other = OfferedMemory(1 << 16), OfferedMemory(1 << 16)
    assert one.offer is not None
    assert os.readlink(f"/proc/self/fd/{one.offer.descriptor}").startswith("/memfd:")
    mapped, rank = other.join([one.offer, other.offer], 1)
    assert rank == 0
    of_first, _ = one.join([one.offer, other.offer], 0)
    of_first[5] = 7
    assert mapped[5] == 7
    stale = Offer(one.offer.host, one.offer.pid, one.offer.descriptor, b"of another process")
    assert other.join([stale, other.offer], 1)[1] == 1
    one.close()
    assert other.join([one.offer, other.offer], 1)[1] == 1


class Odd(vLLMModule):
    """Tensors of every kind, which every rank keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in odd_tensors().items():
            self.register_buffer(name, torch.empty_like(tensor, device="meta"))


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "scalar": torch.randn(()),
        "nothing": torch.empty(0, 7),
        "no_columns": torch.empty(7, 0),
        "flags": torch.rand(9, 11) > 0.5,
        "one_row": torch.randn(1, 999),
        "long": torch.arange(5000),
        "deep": torch.randn(3, 1, 50, 7).bfloat16(),
        "eight_bits": torch.randn(33, 3).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_every_kind_go_round(size: int) -> None:
    """Scalars, empty tensors, bools, rows and tensors larger than a batch are passed unchanged."""
    tensors = odd_tensors()

    def load(rank: int) -> dict[str, torch.Tensor]:
        module = Odd()
        checkpoint = PairsCheckpoint(SOURCE, tensors)
        COOPERATING["load_by_threads"](module, checkpoint, rank, size)
        parts.append(checkpoint.bytes_read)
        return module.state_dict()

    parts: list[int] = []
    with COOPERATING["small_batches"](512, 3):
        states = run_ranks(size, load)
    for state in states:
        for name, tensor in tensors.items():
            one, other = (each.reshape(-1).view(torch.uint8) for each in (state[name], tensor))
            assert torch.equal(one, other), name
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(parts) == nbytes
    assert max(parts) < nbytes / size * 1.3


@pytest.mark.parametrize("other", [0, 1, 2])
def test_ranks_that_read_in_another_order_read_by_themselves(other: int) -> None:
    """One of three has the names in another order, and each reads all that it holds."""
    tensors = odd_tensors()

    def load(rank: int) -> tuple[dict[str, torch.Tensor], int]:
        order = reversed(tensors.items()) if rank == other else tensors.items()
        module, checkpoint = Odd(), PairsCheckpoint(SOURCE, dict(order))
        cooperation = Cooperation(checkpoint, COOPERATING["gather"], rank, 3, 5.0)
        with COOPERATING["telling_threads"]():
            COOPERATING["load_by"](cooperation, vLLMModule.load_weights, module)
        return module.state_dict(), checkpoint.bytes_read

    with COOPERATING["small_batches"](512, 3):
        loaded = run_ranks(3, load)
    for state, nbytes in loaded:
        assert nbytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            one, another = (each.reshape(-1).view(torch.uint8) for each in (state[name], tensor))
            assert torch.equal(one, another), name


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_counts_the_bytes_of_what_it_holds(size: int) -> None:
    """Whoever read them; what lies between tensors in the ring is none of them."""
    tensors = odd_tensors()
    assert any(tensor.nbytes % 64 for tensor in tensors.values())

    def load(rank: int) -> int:
        checkpoint = PairsCheckpoint(SOURCE, tensors)
        cooperation = Cooperation(checkpoint, COOPERATING["gather"], rank, size, 60.0)
        with COOPERATING["telling_threads"]():
            COOPERATING["load_by"](cooperation, vLLMModule.load_weights, Odd())
        return cooperation.bytes_read

    with COOPERATING["small_batches"](512, 3):
        counted = run_ranks(size, load)
    assert [*counted] == [sum(tensor.nbytes for tensor in tensors.values())] * size


class Flattened(vLLMModule):
    """Matrices that a checkpoint stores as vectors; a rank keeps rows, columns or all of them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        whole, cut = Dim.whole(12), Dim.cut(12, size)
        for name, dims in {
            "rows": (cut, whole),
            "columns": (whole, cut),
            "all": (whole,) * 2,
        }.items():
            of_rank = {"tp_rank": rank, "tp_size": size, "dtype": torch.float32}
            setattr(self, name, FlattenedParameter(*dims, column=True, **of_rank))


@pytest.mark.parametrize("size", [2, 3])
def test_matrices_stored_as_vectors_go_round(tmp_path: Path, size: int) -> None:
    """Files are read as matrices, of which a rank also takes columns; each byte is read once."""
    tensors = {name: torch.randn(144, 1) for name in ("rows", "columns", "all")}
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[int] = []

    def load(rank: int) -> dict[str, torch.Tensor]:
        module = Flattened(rank, size)
        with open_checkpoint(tmp_path) as checkpoint:
            COOPERATING["load_by_threads"](module, checkpoint, rank, size)
            read.append(checkpoint.bytes_read)
        return {name: tensor.data for name, tensor in module.named_parameters()}

    with COOPERATING["small_batches"](512, 3):
        states = run_ranks(size, load)
    matrix = {name: tensor.view(12, 12) for name, tensor in tensors.items()}
    for rank, state in enumerate(states):
        assert torch.equal(state["rows"], matrix["rows"].chunk(size, 0)[rank])
        assert torch.equal(state["columns"], matrix["columns"].chunk(size, 1)[rank])
        assert torch.equal(state["all"], matrix["all"])
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux only")
@pytest.mark.parametrize("refused", [False, True])
def test_the_memory_of_the_ring_is_freed_when_the_load_ends(refused: bool) -> None:
    """Also if it fails, and before Python collects garbage."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:vllm-module")

    def load(rank: int) -> None:
        class Loaded(Odd):
            def process_weights_after_loading(self) -> None:
                used.append(mappings())
                if refused:
                    raise OSError

        checkpoint = PairsCheckpoint(SOURCE, odd_tensors())
        with suppress(OSError):
            COOPERATING["load_by_threads"](Loaded(), checkpoint, rank, 2)

    used: list[int] = []
    before = mappings()
    gc.disable()
    try:
        with COOPERATING["small_batches"](512, 3):
            run_ranks(2, load)
        assert mappings() == before
    finally:
        gc.enable()
    assert max(used) > before


class Narrow(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4, dtype=torch.float16, device="meta"))
        self.late = nn.Parameter(torch.empty(4, device="meta"))


def test_a_value_that_does_not_fit_is_refused_by_name() -> None:
    """A cast out of the ring that loses a value names the tensor, as a direct read does."""
    tensors = {"first": torch.full((4,), 1e6), "late": torch.ones(4)}

    def load(rank: int) -> None:
        COOPERATING["load_by_threads"](Narrow(), PairsCheckpoint(SOURCE, tensors), rank, 2)

    with (
        COOPERATING["small_batches"](),
        pytest.raises(WeightReadError, match=r"first: .* 4 finite values beyond the range"),
    ):
        run_ranks(2, load)

"""Engines of two ranks whose experts move: one rank's tokens, and updates that are right."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams
from vllm_module.adapters import Adapter, adapter_config
from vllm_module.config import ModelConfig
from vllm_module.errors import RankError, ShardingError, UnsupportedModelError
from vllm_module.export.sharded_state import shard
from vllm_module.runtime.ranks import worker_experts
from vllm_module.testing import random_weights
from vllm_module.weights.changes import Changes
from vllm_module.weights.digests import digest_weight

HERE = Path(__file__).parent
PIPELINE = runpy.run_path(str(HERE / "test_pipeline.py"))
engine, tokens, write = PIPELINE["engine"], PIPELINE["tokens"], PIPELINE["write"]
Tensors = dict[str, torch.Tensor]
CASES = 200 if os.environ.get("AT_LENGTH") else 12
SPREAD: dict[str, Any] = {
    "tensor_parallel_size": 2, "enable_expert_parallel": True, "block_size": 4, "enable_eplb": True,
}  # fmt: skip


@pytest.fixture(
    scope="module", params=["mixtral", pytest.param("deepseek-v3", marks=pytest.mark.at_length)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    made: Path = write(tmp_path_factory.mktemp("experts") / name, name)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    """An engine of one rank."""
    with engine(folder, block_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(alone: LLM) -> Any:
    return tokens(alone)


@pytest.fixture(scope="module")
def spread(folder: Path) -> Iterator[LLM]:
    """An engine that has three more places in each layer."""
    with engine(folder, num_redundant_experts=3, **SPREAD) as llm:
        yield llm


def drawn(draw: random.Random, placement: tuple[int, ...]) -> list[int]:
    """Return a placement of as many places on two ranks, without an expert twice on one."""
    number = 1 + max(placement)
    half = -(-len(placement) // 2)
    while True:
        more = draw.sample(range(number), k=len(placement) - number)
        placed = draw.sample([*range(number), *more], k=len(placement))
        if all(len({*held}) == len(held) for held in (placed[:half], placed[half:])):
            return placed


def move(llm: LLM, draw: random.Random) -> int:
    old = llm.expert_placements()
    return llm.rearrange_experts(placements={path: drawn(draw, old[path]) for path in old})


def stored(weights: Tensors) -> dict[str, str]:
    return {name: digest_weight(tensor).hex for name, tensor in weights.items()}


def test_tokens_are_those_of_one_rank(spread: LLM, folder: Path, expected: Any) -> None:
    """Before, between and after moves, and while they go on; nothing is computed anew."""
    draw = random.Random(1)
    assert tokens(spread) == expected
    weights = load_file(folder / "model.safetensors")
    moved = [move(spread, draw) for _ in range(4)]
    assert all(moved)
    assert spread.digest().tensors == stored(weights)
    found: list[Any] = []
    working = threading.Thread(target=lambda: found.extend(tokens(spread) for _ in range(6)))
    computed = spread.engine.totals.prompt_tokens
    working.start()
    moves = 0
    while working.is_alive():
        moves += move(spread, draw) > 0
    working.join()
    assert moves > 5
    assert found == [expected] * 6
    assert spread.weight_version == "0"
    assert spread.engine.totals.prompt_tokens > computed


def test_updates_after_moves_are_right(
    spread: LLM, alone: LLM, folder: Path, tmp_path: Path
) -> None:
    """In every drawn case: whole and partial, as mapping, stream and single elements."""
    draw = random.Random(2)
    kind = folder.name
    versions = [
        load_file(write(tmp_path / f"{seed}", kind, seed=seed) / "model.safetensors")
        for seed in (11, 12, 13)
    ]
    weights = load_file(folder / "model.safetensors")
    for case in range(CASES):
        move(spread, draw)
        new = draw.choice(versions)
        names = draw.sample(sorted(new), k=draw.choice([1, len(new) // 3, len(new)]))
        some = {name: new[name] for name in names}
        update: Any = some
        if case % 3 == 1:
            update = iter(some.items())
        if case % 3 == 2:  # the first elements alone
            update = {}
            for name in names:
                values, some[name] = new[name].view(-1)[:5].clone(), weights[name].clone()
                some[name].view(-1)[:5] = values
                update[name] = Changes(torch.arange(0, 5), values, new[name].shape)
        weights |= some
        spread.update_weights(update)
        assert spread.digest().tensors == stored(weights), case
    alone.update_weights(weights)
    assert tokens(spread) == tokens(alone)
    spread.reload_weights()
    alone.reload_weights()


def test_the_engines_own_counts_say_who_moves(spread: LLM, expected: Any) -> None:
    """Counts are those of what is computed; the busiest rank has less to do afterwards."""
    old = spread.expert_placements()
    # All on rank 0 that tokens go to most.
    spread.rearrange_experts(placements=old)
    assert tokens(spread) == expected
    counts = spread.expert_counts()
    assert counts.keys() == old.keys()
    (layer,) = {sum(of_layer) for of_layer in counts.values()}  # as many tokens in each layer
    assert layer > 0

    def busiest(placements: dict[str, tuple[int, ...]]) -> list[float]:
        most = []
        for path, placed in placements.items():
            half = -(-len(placed) // 2)
            copies = [placed.count(expert) for expert in placed]
            shares = [counts[path][e] / n for e, n in zip(placed, copies, strict=True)]
            most.append(max(sum(shares[:half]), sum(shares[half:])))
        return most

    spread.rearrange_experts()
    new = spread.expert_placements()
    assert all(a <= b + 1e-9 for a, b in zip(busiest(new), busiest(old), strict=True))
    assert {sum(each) for each in spread.expert_counts().values()} == {0}
    assert spread.rearrange_experts([*counts.values()]) == 0  # nothing is better
    assert tokens(spread) == expected


@pytest.mark.parametrize("way", ["own counts", "counts", "as it is", "elsewhere"])
def test_counts_begin_again_with_each_call(spread: LLM, way: str) -> None:
    """Whether an expert moves or not."""
    placements = spread.expert_placements()
    given: dict[str, Any] = {
        "own counts": {},
        "counts": {"counts": [[1.0] * (1 + max(each)) for each in placements.values()]},
        "as it is": {"placements": placements},
        "elsewhere": {"placements": {p: drawn(random.Random(7), e) for p, e in placements.items()}},
    }
    for _ in range(2):
        spread.rearrange_experts(**given[way])
        assert {sum(each) for each in spread.expert_counts().values()} == {0}
        tokens(spread)
        assert all(sum(each) for each in spread.expert_counts().values())


def test_what_cannot_be_is_refused(spread: LLM, alone: LLM, folder: Path, expected: Any) -> None:
    """By name, before anything moves."""
    placements = spread.expert_placements()
    path, placed = next(iter(placements.items()))
    for wrong, message in [
        ({"counts": [[1.0]]}, "counts should have a row for each of"),
        ({"counts": [], "placements": {}}, "either counts of tokens or placements"),
        ({"placements": {"model": placed}}, "no layer 'model' has experts"),
        ({"placements": {path: [0, 1]}}, "lacks expert 2"),
        ({"placements": {path: range(1 + max(placed))}}, "places for experts, got"),
    ]:
        with pytest.raises((ValueError, ShardingError), match=message):
            spread.rearrange_experts(**wrong)
    kinds: dict[str, Any] = {"float": 1.0, "bool": True, "torch.float32": torch.tensor(1.0)}
    for kind, number in kinds.items():
        with pytest.raises(ValueError, match=f"as integers, got .* of type {kind}"):
            spread.rearrange_experts(placements={path: [number, *placed[1:]]})
    with pytest.raises(ShardingError, match="twice on rank"):
        spread.rearrange_experts(placements={path: sorted(placed)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(spread.engine.adapters, "mine", None)
        with pytest.raises(ValueError, match="the adapter 'mine' has parts beside the experts"):
            move(spread, random.Random(4))
    assert spread.expert_placements() == placements
    assert tokens(spread) == expected
    with pytest.raises(ValueError, match="no experts are spread over ranks"):
        alone.rearrange_experts([])
    with pytest.raises(ValueError, match="give enable_expert_parallel"):
        engine(folder, num_redundant_experts=1)
    with pytest.raises(ShardingError, match="1 ranks have places for 0"):
        engine(folder, num_redundant_experts=1, enable_expert_parallel=True)


def test_other_ways_to_load_know_the_places(spread: LLM, folder: Path, expected: Any) -> None:
    """Sleep, loading again, and a replica that loads from a server that was there before."""
    opened = spread.serve_weights()
    move(spread, random.Random(3))
    placed = spread.expert_placements()
    with opened as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MODULE_REPLICA_TOKEN", server.token)
        with engine(server.url, block_size=4) as llm:
            assert llm.digest().tensors == stored(load_file(folder / "model.safetensors"))
            assert tokens(llm) == expected
    spread.sleep(level=2)
    spread.wake_up()
    assert tokens(spread) == expected
    spread.reload_weights()
    assert spread.expert_placements() == placed
    assert tokens(spread) == expected


def test_an_adapter_is_loaded_to_the_new_places(
    spread: LLM, alone: LLM, tmp_path: Path, expected: Any
) -> None:
    """Also one that was loaded before the move, and had to be unloaded for it."""
    settings = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 8,
        "target_modules": ["w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    config = adapter_config(settings, "settings")
    parts = Adapter(alone.executor.worker.model, config).expected_weights()
    weights = {name: each * 20 for name, each in random_weights(parts, seed=5).items()}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def adapted(llm: LLM) -> Any:
        llm.load_adapter("mine", tmp_path)
        found = llm.generate(PIPELINE["PROMPTS"], asked, use_tqdm=False, lora_request="mine")
        llm.unload_adapter("mine")
        return [list(each.outputs[0].token_ids) for each in found]

    tuned = adapted(alone)
    assert tuned != [each[0][:6] for each in expected]
    for seed in (8, 9):
        assert adapted(spread) == tuned
        move(spread, random.Random(seed))
    assert adapted(spread) == tuned


def test_all_ranks_take_what_the_first_one_was_given(
    spread: LLM, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    """Where each makes the call; and placements may be tensors."""
    draw, old = random.Random(6), spread.expert_placements()
    first, own = ({path: drawn(draw, old[path]) for path in old} for _ in range(2))
    given = {path: torch.tensor(placed) for path, placed in first.items()}
    # What the first rank of a launcher's gives the others; here is one process that calls.
    monkeypatch.setattr(spread.executor, "of_first", lambda _: (None, given))
    spread.rearrange_experts(placements=own)
    assert spread.expert_placements() == {path: tuple(placed) for path, placed in first.items()}
    assert tokens(spread) == expected


def test_experts_of_pipeline_stages_move(folder: Path, alone: LLM, expected: Any) -> None:
    """Within each stage; layers have the order of the model, not that of ranks."""
    with engine(folder, pipeline_parallel_size=2, **SPREAD) as llm:
        placements = llm.expert_placements()
        assert [*placements] == sorted(placements)
        counts = [range(len(placed)) for placed in placements.values()]
        assert move(llm, random.Random(7)) > 0
        assert tokens(llm) == expected
        assert all(sum(each) for each in llm.expert_counts().values())
        llm.rearrange_experts(counts)
        assert tokens(llm) == expected
        assert llm.digest().tensors == alone.digest().tensors


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "raise"])
def test_a_rank_that_fails_while_experts_move_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end with the reason, and nothing is computed with a mixture.

    If it goes on, others know at once, and loading heals: here a sharded state, which has an order.
    """
    folder = write(tmp_path / "mixtral", "mixtral")
    if fault == "raise":
        config = ModelConfig(model=str(folder), enable_expert_parallel=True)
        shard(config, 2, folder := tmp_path / "sharded")
        with pytest.raises(UnsupportedModelError, match=r"sharded state, .*each expert once"):
            engine(folder, num_redundant_experts=1, **SPREAD)
    limit = 60.0 if fault == "raise" else 4.0
    with engine(folder, load_config={"timeout": limit}, **SPREAD) as llm:
        expected, placements = tokens(llm), llm.expert_placements()
        pid = llm.executor._ranks.processes._processes[1].pid
        right, calls = worker_experts.exchange_boxes, []

        def faulty(*given: Any, **named: Any) -> Any:
            calls.append(None)
            if len(calls) == 2:  # of the second layer
                if fault == "raise":
                    raise MemoryError("no memory for what moves")
                os.kill(pid, getattr(signal, fault))
            return right(*given, **named)

        # In the middle of a move: no argument of ours makes a rank fail there.
        monkeypatch.setattr(worker_experts, "exchange_boxes", faulty)
        message = "no memory for what moves|rank 1|rank 0"
        begin = time.monotonic()
        with pytest.raises((RankError, MemoryError), match=message):
            move(llm, random.Random(5))
        assert time.monotonic() - begin < 30
        assert len(calls) == 2
        with pytest.raises((RankError, RuntimeError)):
            tokens(llm)
        if fault == "raise":
            llm.reload_weights()
            assert tokens(llm) == expected
            assert move(llm, random.Random(5)) > 0
            counts = llm.expert_counts()
            llm.sleep(level=2)
            llm.wake_up()
            assert (llm.expert_placements(), llm.expert_counts()) == (placements, counts)
            assert tokens(llm) == expected

"""The ranks of an engine compute the same steps."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.config import EngineConfig
from vllm_module.kernels.matmul.products import Products, products_in_use
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks import fastest
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
RANKS: Any = runpy.run_path(str(Path(__file__).with_name("running.py")))
HERE, PAGE, FOLLOWING, SUPPORT = (RANKS[name] for name in ("HERE", "PAGE", "FOLLOWING", "SUPPORT"))
executor, step, PREFILL = (RANKS[name] for name in ("executor", "step", "PREFILL"))
logits, workers = (RANKS[name] for name in ("logits", "workers"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Executor]:
    made = executor(folder, 1)
    made.start(256)
    yield made
    made.close()


def test_two_ranks_compute_what_one_computes(alone: Executor, shared: Executor) -> None:
    """Logits of prompts, of their chunks and of the tokens after them do not depend on the size."""
    assert (shared.rank, shared.size) == (0, 2)
    for inputs in (
        PREFILL,
        step([4, 17, 34], [1, 1, 1]),
        step([5, 40, 35, 7], [1, 23, 1, 7]),
        step([6, 41, 36, 8], [1, 1, 1, 1]),
    ):
        expected = alone.run(inputs)
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(shared.run(inputs), expected, rtol=0, atol=1e-4)


def served(made: Executor, overlapped: bool) -> tuple[list[Any], int]:
    """Return the tokens and the logprob of requests, and how many steps were launched early."""
    early = 0

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal early
        early += bool(inputs.num_sampled)
        return made.run(inputs, sampled)

    scheduler = Scheduler(PagePool(40, PAGE), PagePool(0, PAGE), 8, 100)
    engine = Engine(execute, scheduler, 130, 256, wait=made.wait, async_scheduling=overlapped)
    requests = []
    for index in range(5):
        params = SamplingParams(seed=index, temperature=0.5, max_tokens=9 + index, logprobs=0)
        requests.append(engine.add(str(index), [index, 3, 5], params))
        engine.step()
    while engine.requests:
        engine.step()
    assert all(request.error is None for request in requests)
    sequences = [request.sequences[0] for request in requests]
    return [(each.output, each.cumulative_logprob) for each in sequences], early


def test_ranks_get_the_tokens_of_steps_that_are_launched_early(
    alone: Executor, shared: Executor
) -> None:
    """Only the first rank chooses tokens; the next step begins on every rank with these."""
    expected, none_early = served(alone, False)
    assert none_early == 0
    for made in (alone, shared):
        tokens, early = served(made, True)
        assert early > 9
        assert [ids for ids, _ in tokens] == [ids for ids, _ in expected]
        for (_, got), (_, wanted) in zip(tokens, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-3)


def test_every_rank_keeps_the_block_tables(shared: Executor) -> None:
    """A step that sends no pages computes with those that an earlier one sent to every rank."""
    shared.run(PREFILL)
    decoding = step([4, 17, 34], [1, 1, 1])
    expected = shared.run(decoding).clone()
    shared.run(step([3, 16, 33], [3, 16, 33]))
    decoding.new_pages = []
    assert torch.equal(shared.run(decoding), expected)
    other = step([4, 17, 34], [1, 1, 1])
    other.new_pages = [(row, 0, [page + 16 for page in pages]) for row, _, pages in other.new_pages]
    shared.run(other)
    assert not torch.equal(shared.run(decoding), expected)


def test_one_rank_alone_needs_no_processes(shared: Executor, alone: Executor) -> None:
    """It starts no process, also while another engine runs; and it cannot follow."""
    before = workers()
    assert (alone.rank, alone.size) == (0, 1)
    logits(alone)
    assert workers() == before
    with pytest.raises(RuntimeError, match="rank 0 leads"):
        alone.follow()


def test_pages_are_as_many_as_fit_and_can_be_used(shared: Executor, folder: Path) -> None:
    """The cache has no more pages than all sequences fill; not one page is refused."""
    page = 2 * 2 * 6 * 16 * PAGE * 4  # layers, keys and values, heads, features, tokens, bytes
    assert shared.worker.page_bytes == page // 2
    config = {"kv_cache_memory_bytes": 9 * page, "swap_space": 2 * page / 2**30}
    for most, length, expected in ((2, 60, (8, 2)), (2, 100, (9, 2)), (1, 16, (1, 1))):
        made = executor(folder, 1, max_num_seqs=most, **config)
        assert made.start(length) == expected
        made.close()
    refused = executor(folder, 1, kv_cache_memory_bytes=page - 1)
    with pytest.raises(ValueError, match=f"page of 16 tokens, which takes {page} bytes: raise"):
        refused.start(100)


@pytest.mark.parametrize(("length", "messages"), [(1, 1), (250, 1), (5000, 2)])
def test_a_step_is_told_in_one_message(
    shared: Executor, monkeypatch: pytest.MonkeyPatch, length: int, messages: int
) -> None:
    """A step takes one broadcast, and a large one two."""
    count, broadcast = 0, dist.broadcast

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(*arguments, **keywords)

    monkeypatch.setattr(dist, "broadcast", counted)
    sequences = -(-length // 256)
    shared.run(step([length // sequences] * sequences, [length // sequences] * sequences))
    assert count == messages


def test_every_rank_multiplies_as_rank_0_chose(
    alone: Executor, shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends its choice of products with each step, and a rank that obeys uses it."""
    chosen, told, used = Products(few=True), [], []
    monkeypatch.setattr(shared, "products", chosen)
    tell = shared._ranks.tell
    monkeypatch.setattr(
        shared._ranks, "tell", lambda message: (told.append(message), tell(message))
    )
    shared.run(PREFILL)
    assert told == [("run", (PREFILL, chosen))]
    monkeypatch.setattr(alone.worker, "run", lambda _: used.append(products_in_use.get()))
    alone._obey(*told[0])
    assert used == [chosen]
    assert products_in_use.get() == Products()


def test_products_are_measured_once_and_for_float32_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of a process share one measurement; a model in bfloat16 needs none."""
    measured = []

    def measure() -> Products:
        measured.append(len(measured))
        return Products(many=True)

    monkeypatch.setattr(fastest, "fastest_products", measure)
    fastest._fastest_products.cache_clear()
    try:
        for dtype, expected in (("bfloat16", False), ("float32", True), ("float32", True)):
            config = EngineConfig(kv_cache_memory_bytes=1 << 20)
            model = ModelConfig(model=str(folder), dtype=dtype)
            made = Executor(model, LoadConfig(), DeviceConfig(device="cpu"), config)
            assert made.products.many == expected
            made.close()
        assert measured == [0]
    finally:
        fastest._fastest_products.cache_clear()


def test_rows_of_codes_are_chosen_for_quantized_models_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with codes are measured for quantized weights, whatever the model's dtype."""
    monkeypatch.setattr(fastest, "fastest_code_rows", lambda threads: 64)
    config = EngineConfig(kv_cache_memory_bytes=1 << 20)
    for dtype, scheme, expected in (
        ("float32", None, 0),
        ("bfloat16", "int8_per_channel_weight_only", 64),
        ("float32", "int8_per_channel_weight_only", 64),
    ):
        model = ModelConfig(model=str(folder), dtype=dtype, quantization=scheme)
        made = Executor(model, LoadConfig(), DeviceConfig(device="cpu"), config)
        assert made.products.codes == expected
        made.close()


@pytest.mark.parametrize(
    ("shape", "count", "dtype", "large"),
    [
        ((512, 511), 8, torch.float32, False),
        ((256, 256), 32, torch.float32, True),
        ((256, 256), 63, torch.bfloat16, False),
        ((256, 256), 64, torch.bfloat16, True),
    ],
)
def test_the_loops_for_floats_are_for_8_mib_of_weights(
    shape: tuple[int, int],
    count: int,
    dtype: torch.dtype,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are measured once, beside the library that was chosen, and not for smaller models."""
    library, asked = Products(few=dtype == torch.float32), []

    def measure(*given: object) -> range:
        asked.append(given)
        return range(1, 4)

    # Clocks of this machine would decide.
    monkeypatch.setattr(fastest, "_fastest_products", lambda threads: Products(few=True))
    monkeypatch.setattr(fastest, "fastest_float_rows", measure)
    monkeypatch.setattr(fastest, "can_attend_on_pages", lambda dtype: True)
    fastest._fastest_float_rows.cache_clear()
    layers = (torch.nn.Linear(*shape, device="meta", dtype=dtype) for _ in range(count))
    model = torch.nn.ModuleList(layers)
    try:
        for _ in range(2):
            found = fastest.fastest_for(model, dtype)
            changed = {"floats": range(1, 4), "pages": True} if large else {}
            assert found == library._replace(**changed)
        assert asked == [(dtype, library)][:large]
        assert fastest.fastest_for(model, dtype, decodes=False) == library
    finally:
        fastest._fastest_float_rows.cache_clear()


def test_ranks_of_torchrun_follow_the_first(folder: Path, tmp_path: Path, alone: Executor) -> None:
    """They follow in a group that is there, joined, or a part of the world; a failure is named."""
    (tmp_path / "checkpoint").symlink_to(folder)
    SUPPORT["torchrun"](2, HERE / "following.py", tmp_path)
    expected = alone.run(FOLLOWING["FIVE"])
    for case in ("joined", "found", "surrounding"):
        computed = torch.load(tmp_path / f"{case}.pt")
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-4)

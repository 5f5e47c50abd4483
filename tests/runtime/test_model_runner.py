"""Running steps: tables that stay, one copy a step, and graphs that ask nothing of the host."""

from __future__ import annotations

import itertools
import runpy
from array import array
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from vllm_module import ModelConfig, get_model, vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.rows import act_and_mul
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.transfers import upload

CPU = torch.device("cpu")
PAGE, PAGES = 4, 24
SEQUENCES, MOST_PAGES = 9, 5

# runpy, because pytest's importlib mode has no imports between test files.
_simulated = runpy.run_path(str(Path(__file__).with_name("simulated_device.py")))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]
HostError = _simulated["HostError"]
CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(
    str(Path(__file__).parents[1] / "models/configurations.py")
)["CONFIGS"]


class Beside:
    """A model on the CPU that runs without graphs, and the same on a device, with graphs."""

    def __init__(self, model: vLLMModule, sequences: int, most_tokens: int = 0) -> None:
        self.device, copied = SimulatedDevice(), deepcopy(model)
        self.plain = ModelRunner(model, CPU, sequences, MOST_PAGES)
        self.caches = [KVCache(model, PAGES, PAGE, CPU, torch.float32)]
        with self.device.present():
            self.device.take(copied)
            self.caches.append(KVCache(copied, PAGES, PAGE, DEVICE, torch.float32))
            self.graphs = ModelRunner(copied, DEVICE, sequences, MOST_PAGES)
            self.graphs.capture(most_tokens)
        self.stored = [
            (theirs, ours.memory)
            for theirs, ours in zip(*(each._caches for each in self.caches), strict=True)
        ]

    def check(self, step: StepInputs) -> int:
        """Run a step on both, compare logits and caches; return how many graphs were replayed."""
        before = self.replays
        self.device.copies.clear()
        expected = self.plain.run(step)
        with self.device.present():
            logits = self.graphs.run(step)
            close(logits.memory, expected)
            check_first_tokens(self.graphs, self.device, logits.contiguous())
        for theirs, ours in self.stored:
            close(ours, theirs)
        ((_, is_pinned),) = self.device.copies
        assert is_pinned, "the host waits for a copy"
        return self.replays - before

    @torch.inference_mode()
    def fill(self, seed: int) -> None:
        """Fill the caches with the same random numbers."""
        for theirs, ours in self.stored:
            ours.copy_(theirs.normal_(generator=torch.Generator().manual_seed(seed)))

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs._graphs.values())

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits of up to about 20, from products with different numbers of rows."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def check_first_tokens(graphs: ModelRunner, device: Any, logits: Any) -> None:
    """Compare tokens with those of the logits alone; a graph has chosen them, if it has logits."""
    decoded = graphs._decoded.untyped_storage().data_ptr()
    device.operators.clear()
    first = graphs.first_tokens(logits)
    chosen = device.operators["draw_tokens"] == 0
    assert chosen == (logits.untyped_storage().data_ptr() == decoded)
    assert torch.equal(first.memory, logits.memory.argmax(-1))
    assert torch.equal(graphs.first_tokens(logits[1:]).memory, first.memory[1:])


@pytest.fixture(scope="module")
def beside(model: vLLMModule) -> Iterator[Beside]:
    made = Beside(model, SEQUENCES)
    yield made
    made.close()


def laid_out(
    contexts: list[int], rows: list[int], ids: list[int], tables: list[list[int]], first: int = 0
) -> StepInputs:
    """Return a step that decodes, and lists each sequence's pages from the ``first`` on."""
    last = [context - 1 for context in contexts]
    slots = [
        pages[position // PAGE] * PAGE + position % PAGE
        for pages, position in zip(tables, last, strict=True)
    ]
    count = len(contexts)
    listed = [(row, first, pages[first:]) for row, pages in zip(rows, tables, strict=True)]
    return StepInputs(
        ids, last, slots, contexts, list(range(count + 1)), rows,
        [each for each in listed if each[2]], max(map(len, tables)), list(range(count)), 1,
    )  # fmt: skip


@st.composite
def decoding(draw: st.DrawFn) -> StepInputs:
    """Draw a step of 1 to 9 decoding sequences of up to 20 tokens, without shared pages."""
    contexts = draw(st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=SEQUENCES))
    free = draw(st.permutations(range(PAGES)))
    tables, fits = [], []
    for context in contexts:
        needed = -(-context // PAGE)
        if len(free) >= needed:
            tables.append(free[:needed])
            free = free[needed:]
            fits.append(context)
    ids = draw(st.lists(st.integers(0, 129), min_size=len(fits), max_size=len(fits)))
    adjoin = draw(st.booleans())
    rows = list(range(SEQUENCES)) if adjoin else draw(st.permutations(range(SEQUENCES)))
    step = laid_out(fits, rows[: len(fits)], ids, tables)
    step.rows = draw(st.lists(st.sampled_from(range(len(fits))), unique=True))
    return step


@given(st.lists(decoding(), min_size=1, max_size=3), st.integers(0, 9))
@settings(suppress_health_check=["function_scoped_fixture"], max_examples=15)
def test_a_replayed_graph_gives_the_logits_of_a_step_without_graphs(beside, steps, seed) -> None:
    """Logits and cache are equal, whatever earlier steps left in the tables and the buffer."""
    beside.fill(seed)
    for step in steps:
        listed = sum(len(pages) for _, _, pages in step.new_pages)
        assert beside.check(step) == (listed <= SEQUENCES)
        step.new_pages = []  # every rank has kept them
        assert beside.check(step) == 1


def of_other_rows(self: ModelRunner, logits: torch.Tensor) -> torch.Tensor:
    return self._first[: len(logits)]


def of_the_step_before(self: ModelRunner, logits: torch.Tensor) -> torch.Tensor:
    vars(self)["shown"], shown = self._first.clone(), vars(self).get("shown", self._first)
    return shown[-len(logits) :]


def of_the_largest_graph(self: ModelRunner, logits: torch.Tensor) -> torch.Tensor:
    return self._firsts[(False, True), SEQUENCES][-len(logits) :]


@pytest.mark.parametrize("fault", [of_other_rows, of_the_step_before, of_the_largest_graph])
def test_wrong_first_tokens_are_found(beside, monkeypatch, fault) -> None:
    """Such as tokens of other rows, of the step before, or of a graph of another size."""
    beside.fill(3)
    tables = [[0], [1], [2], [3]]
    steps = [laid_out([3] * 4, [0, 1, 2, 3], ids, tables) for ids in ([0, 1, 2, 3], [9] * 4)]

    def check() -> None:
        for step in (*steps, *steps):
            beside.check(step)

    check()
    monkeypatch.setattr(ModelRunner, "first_tokens", fault)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("count", [3, 9])
def test_tokens_that_stay_on_the_device_are_indexed(beside, count) -> None:
    """With graphs and without, in any order; a -1, which is no token, is replaced by some token."""
    beside.fill(2)
    rows, tables = list(range(count)), [[row] for row in range(count)]
    ids = [5 + row for row in rows]
    expected = beside.plain.run(laid_out([3] * count, rows, ids, tables))
    step = laid_out([3] * count, rows, [count - row for row in rows], tables)
    step.num_sampled = count + 1
    chosen = torch.tensor([-1, *reversed(ids)])
    close(beside.plain.run(step, chosen), expected)
    with beside.device.present():
        before, on_device = beside.replays, type(beside.graphs._tables)(chosen)
        close(beside.graphs.run(step, on_device).memory, expected)
        assert beside.replays == before + 1
        step.input_ids[0] = 0
        logits = beside.graphs.run(step, on_device).memory
    close(logits[1:], expected[1:])
    close(beside.plain.run(step, chosen), logits)


def test_prompts_are_not_replayed(beside) -> None:
    """A step with a sequence of several tokens runs without a graph."""
    rows = [2, 0]
    step = StepInputs(
        [5, 6, 7], [0, 1, 0], [0, 1, 4], [2, 1], [0, 2, 3], rows,
        [(2, 0, [0]), (0, 0, [1])], 1, [1, 2], 2,
    )  # fmt: skip
    assert beside.check(step) == 0


def test_pages_are_written_to_the_tables_when_they_are_sent(beside) -> None:
    """A page that is added or replaced changes its entry, and the rest of the row stays."""
    beside.fill(0)
    grown = [[1, 2], [3, 4]]
    beside.check(laid_out([5, 6], [4, 1], [7, 8], grown))
    for pages in grown:
        pages.append(pages[-1] + 10)
    assert beside.check(laid_out([9, 9], [4, 1], [7, 8], grown, first=2)) == 1
    grown[1][1:] = [20, 21]
    assert beside.check(laid_out([10, 10], [4, 1], [7, 8], grown, first=1)) == 1
    for runner in (beside.plain, beside.graphs):
        tables = getattr(runner._tables, "memory", runner._tables)
        assert tables[[4, 1], :3].tolist() == grown


class Stub:
    """A model that remembers how many tokens it was called with, and may do something wrong."""

    def __init__(self, wrong: Callable[[torch.Tensor], object] = id) -> None:
        self.wrong, self.calls = wrong, []  # type: ignore[var-annotated]
        self.given: tuple[Any, ...] = ()

    def __call__(self, ids: torch.Tensor, *others: Any) -> torch.Tensor:
        self.calls.append(len(ids))
        self.given = ids, *others
        self.wrong(ids)
        return ids.unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()


class Tables:
    """A model that only remembers the block tables of its last step."""

    found: list[list[int]]

    def __call__(self, ids: torch.Tensor, positions: Any, metadata: Any) -> torch.Tensor:
        self.found = metadata.block_tables.tolist()
        return torch.zeros(len(ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_sequence_has_its_pages_whatever_its_row(count: int) -> None:
    """For all rows of up to four sequences, adjacent or not, in any order."""
    for rows in itertools.permutations(range(5), count):
        model: Any = Tables()
        runner = ModelRunner(model, CPU, 5, MOST_PAGES)
        others = [row for row in range(5) if row not in rows]
        for step_of in (others, rows):  # what other rows have is not taken for theirs
            tables = [[10 * row + at for at in range(2)] for row in step_of]
            if tables:
                runner.run(
                    laid_out([2 * PAGE] * len(tables), list(step_of), [0] * len(tables), tables)
                )
        assert model.found == tables


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [3, 2, 1]), (9, [9, 8, 4, 2, 1]), (20, [20, 16, 8, 4, 2, 1])],
)
def test_graphs_cover_every_number_of_sequences(most: int, sizes: list[int]) -> None:
    """The largest is captured first, after a run, and is for as many sequences as a step has."""
    with SimulatedDevice().present():
        model = Stub()
        runner = ModelRunner(model, DEVICE, most, 2)  # type: ignore[arg-type]
        runner.capture(0)
        assert model.calls == [size for size in sizes for _ in range(2)]
        for count in range(1, most + 1):
            rows = list(range(count))
            runner.run(laid_out([1] * count, rows, rows, [[0]] * count))
        assert len(model.calls) == 2 * len(sizes)  # all were replayed


ON_HOST = torch.ones(1, dtype=torch.int64)
WRONG: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a tensor": (lambda ids: torch.tensor([1]), "makes a tensor on the host"),
    "numbers": (lambda ids: torch.arange(3), "makes a tensor on the host"),
    "an argument": (lambda ids: ids + ON_HOST, "tensors of the device and of the host"),
    "a copy": (lambda ids: ids.copy_(ON_HOST, non_blocking=True), "copies between host"),
    "a move": (lambda ids: ON_HOST.to(ids.device), "copies between host and device"),
    "a list": (lambda ids: torch.tensor([1], device=ids.device), "makes a tensor on the host"),
    "all numbers": (lambda ids: ids.tolist(), "tolist"),
    "a number": (lambda ids: ids.sum().item(), "waits for the device"),
    "a copy to the host": (lambda ids: ids.cpu(), "copies to the host, which waits"),
    "a branch": (lambda ids: bool((ids > 1).any()), "waits for the device"),
    "a count": (lambda ids: ids.nonzero(), "waits for the device"),
    "a selection": (lambda ids: ids[ids > 1], "waits for the device"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_what_a_graph_may_not_capture_is_found(wrong, message: str) -> None:
    """The simulated device refuses all that would fail, wait or be stale where a graph captures."""
    device = SimulatedDevice()
    with device.present():
        model = Stub()
        runner = ModelRunner(model, DEVICE, 1, 1)  # type: ignore[arg-type]
        model.wrong = lambda ids: wrong(ids) if device.calls is not None else None
        with pytest.raises(UnsupportedModelError, match=message):
            runner.capture(0)


def test_what_launches_a_kernel_is_captured_too(beside, monkeypatch) -> None:
    """A tensor that is made on the host to launch a kernel is found."""
    runner = beside.graphs

    def wrong(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x + torch.ones(1)

    monkeypatch.setattr(act_and_mul, "act_and_mul_triton", wrong)
    device = SimulatedDevice()
    with device.present(), pytest.raises(HostError, match="makes a tensor on the host"):
        ModelRunner(runner.model, DEVICE, 1, 1).capture(0)


WALKED = (
    "cohere2", "deepseek-v3", "gemma2", "gemma3", "glm4", "gpt2", "gpt-oss", "granite",
    "llama-llama3", "llama-yarn", "llama-linear", "llama-dynamic", "llama-longrope", "mixtral",
    "olmo2", "qwen2-moe",
)  # fmt: skip


@pytest.mark.parametrize("kind", WALKED)
def test_a_graph_of_every_kind_of_model_asks_nothing_of_the_host(kind: str, tmp_path: Path) -> None:
    """Whatever its layers and rope scaling; and a replay computes what a step without it does."""
    config = {**CONFIGS[kind], "vocab_size": 64}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    logging.disable_progress_bar()
    theirs.save_pretrained(tmp_path)
    logging.enable_progress_bar()
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": MOST_PAGES * PAGE}
    beside = Beside(get_model(model_config=ModelConfig(model=str(tmp_path), **options)), 1)
    beside.fill(1)
    assert beside.check(laid_out([6], [0], [3], [[2, 5]])) == 0  # two new pages at once
    assert beside.check(laid_out([7], [0], [4], [[2, 5]], first=2)) == 1
    assert beside.check(laid_out([9], [0], [5], [[2, 5, 1]], first=2)) == 1


@given(
    st.lists(st.lists(st.integers(-1, 2**31 - 1), max_size=9), min_size=1, max_size=6), st.data()
)
@settings(max_examples=50)
def test_packed_numbers_are_unpacked_where_kernels_expect_them(lists, data) -> None:
    """Every part has its numbers and dtype, at an address that is a multiple of 16 bytes."""
    dtypes = {"i": torch.int32, "q": torch.int64, "d": torch.float64}
    arrays = [array(data.draw(st.sampled_from("iqd")), numbers) for numbers in lists]
    arrays.append(array("q", [1]))
    for view, numbers in zip(upload(arrays, CPU), arrays, strict=True):
        assert view.dtype == dtypes[numbers.typecode]
        assert view.tolist() == numbers.tolist()
        assert view.storage_offset() * view.itemsize % 16 == 0

"""States in memory: a small hybrid of attention and recurrent layers, on a CPU and with graphs."""

from __future__ import annotations

import random
import runpy
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module import vLLMModule
from vllm_module.config import EngineConfig
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d
from vllm_module.kernels.recurrent.mamba2_scan import mamba2_scan
from vllm_module.layers import Attention, AttentionMetadata, RecurrentLayer
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.cache.state_cache import StateCache, copy_bytes, state_bytes, state_layers
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import Moves, StepInputs

CPU = torch.device("cpu")
PAGE, MOST, ROWS, VOCAB, WIDTH = 4, 64, 4, 40, 8

# runpy, because pytest's importlib mode has no imports between test files.
_simulated = runpy.run_path(str(Path(__file__).with_name("simulated_device.py")))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]


class Recurrent(RecurrentLayer):
    """A convolution of three inputs, and Mamba-2's recurrence of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.state_shapes = {"conv": (WIDTH, 2), "scan": (2, WIDTH // 2, 4)}
        self.state_dtypes = {"conv": None, "scan": torch.float32}
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))
        self.b, self.c = (nn.Parameter(torch.randn(WIDTH, 4)) for _ in range(2))
        self.a = nn.Parameter(torch.tensor([-0.02, -0.3]))

    def forward(self, x: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        if metadata is None:
            return self._over_sequences(x, None)
        return self._over_sequences(x, metadata)

    def _over_sequences(self, x: torch.Tensor, metadata: AttentionMetadata | None) -> torch.Tensor:
        states, places = self.kept(metadata)
        x = causal_conv1d(x, self.weight, None, states["conv"], *places)
        heads = x.view(len(x), 2, -1)
        b, c = ((x @ each).unsqueeze(1) for each in (self.b, self.c))
        dt = torch.full_like(heads[..., 0], 0.5)
        return mamba2_scan(heads, dt, self.a, b, c, None, None, states["scan"], *places).flatten(1)


class Hybrid(vLLMModule):
    """Two recurrent layers, and attention between them unless ``attention`` is false."""

    def __init__(self, *, attention: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.first, self.last = Recurrent(), Recurrent()
        self.attention = Attention(2, WIDTH // 2) if attention else None
        self.load_weights([(name, weight.clone()) for name, weight in self.named_parameters()])

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        x = nn.functional.embedding(input_ids, self.table)
        x = x + nn.functional.rms_norm(self.first(x, metadata), (WIDTH,))
        if self.attention is not None:
            heads = x.view(len(x), 2, -1)
            x = x + self.attention(heads, heads, heads, metadata)
        return nn.functional.rms_norm(x + self.last(x, metadata), (WIDTH,))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.t()


@torch.inference_mode()
def alone(model: vLLMModule, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of a whole sequence, computed anew for each token."""
    tokens, run = list(prompt), model
    for _ in range(count):
        ids = torch.tensor(tokens)
        hidden: torch.Tensor = run(ids, torch.arange(len(ids)))
        tokens.append(int(run.compute_logits(hidden[-1:]).argmax()))  # type: ignore[operator]
    return tokens[len(prompt) :]


class Served:
    """An engine of a model, on a CPU or on a simulated device with graphs."""

    def __init__(
        self,
        model: vLLMModule,
        pages: int,
        host: int = 0,
        *,
        tokens: int = 16,
        simulated: bool = False,
        caching: bool = False,
    ) -> None:
        self.device: Any = SimulatedDevice() if simulated else None
        device, self.model = CPU, deepcopy(model)
        with self.present():
            if simulated:
                self.device.take(self.model)
                device = DEVICE
            self.cache = KVCache(self.model, pages, PAGE, device, torch.float32, host)
            slots = 2 * ROWS if caching else ROWS
            self.states = StateCache(self.model, slots, device, torch.float32, host)
            self.runner = ModelRunner(self.model, device, ROWS, MOST // PAGE)
            if simulated:
                self.runner.capture(32)
        if not simulated:  # what slots hold at first is never read
            for states in self.states._states:
                states.fill_(torch.nan)
        self.scheduler = Scheduler(
            PagePool(pages, PAGE), PagePool(host, PAGE), ROWS, tokens, caching,
            has_states=True, host_states=host,
        )  # fmt: skip
        self.engine = Engine(
            self.execute, self.scheduler, VOCAB, MOST, async_scheduling=simulated,
            wait=lambda event: event.synchronize(),
        )  # fmt: skip
        self.moves, self.hits = [0, 0, 0], 0

    def present(self) -> Any:
        return nullcontext() if self.device is None else self.device.present()

    def execute(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        with torch.inference_mode():
            if inputs.pages is not None:
                self.cache.move(inputs.pages)
            if (moves := inputs.states) is not None:
                self.states.move(moves)
                for index, each in enumerate((moves.swapped_out, moves.copied, moves.swapped_in)):
                    self.moves[index] += len(each)
                self.hits += sum(source >= ROWS for source, _ in moves.copied)
        return self.runner.run(inputs, sampled)

    def check(self, requests: int, seed: int = 0) -> None:
        """Serve drawn requests, and compare the tokens with those of each alone."""
        chance, asked = random.Random(seed), []
        heads: list[list[int]] = []
        if self.scheduler.prefix_caching:
            heads = [[chance.randrange(VOCAB) for _ in range(count)] for count in (9, 17)]
        with self.present():
            for index in range(requests):
                prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))]
                if heads:
                    prompt = chance.choice(heads) + prompt
                count, n = chance.randint(1, 12), chance.choice([1, 1, 3])
                params = SamplingParams(temperature=0, max_tokens=count, n=n)
                asked.append((self.engine.add(str(index), prompt, params), prompt, count))
                for _ in range(chance.choice([0, 2, 6])):
                    self.engine.step()
            while self.engine.requests:
                self.engine.step()
        pristine = Hybrid(attention=any(isinstance(m, Attention) for m in self.model.modules()))
        for request, prompt, count in asked:
            assert request.error is None, request.error
            tokens = alone(pristine, prompt, count)
            assert [s.output for s in request.sequences] == [tokens] * request.params.n
        assert self.scheduler.pool.free_pages == self.scheduler.pool.num_pages


@pytest.mark.parametrize(
    ("tokens", "attention", "caching"),
    [(5, True, False), (40, True, True), (5, False, True), (40, False, False)],
)
def test_tokens_over_a_schedule_are_those_of_whole_sequences(
    tokens: int, attention: bool, caching: bool
) -> None:
    """Chunks, mixed steps, samples, preemptions, swaps and prefixes, from slots full of NaN."""
    served = Served(Hybrid(attention=attention), 17, 20, tokens=tokens, caching=caching)
    served.check(40)
    assert served.scheduler.preemptions
    assert all(served.moves), "something was not tried"
    assert bool(served.hits) == caching


@pytest.mark.parametrize("caching", [False, True])
def test_graphs_give_the_same_tokens(caching: bool) -> None:
    """On a simulated device, where steps overlap and replay graphs."""
    served = Served(Hybrid(), 80, simulated=True, caching=caching)
    served.check(8)
    assert bool(served.hits) == caching
    assert served.moves[1]
    graphs = served.runner._graphs.values()
    assert sum(graph.replays for graph in graphs), "no graph was replayed"
    assert served.runner._sizes[False], "prompts were not captured"


def test_padding_changes_no_state() -> None:
    """A graph of four sequences that replays a step of three leaves the fourth's state alone."""
    served = Served(Hybrid(), 8, simulated=True)
    rows = [1, 2, 3]
    pages = [(row, 0, [row]) for row in rows]
    with served.present():
        for states in served.states._states:
            states.fill_(7)
        slots = [row * PAGE for row in rows]
        served.runner.run(
            StepInputs([5] * 3, [0] * 3, slots, [1] * 3, [0, 1, 2, 3], rows, pages, 1, [0, 1, 2], 1)
        )
    assert served.runner._graphs[(False, True), 4].replays == 1
    for states in served.states._states:
        assert (states.memory[:, 0] == 7).all()
        assert not (states.memory[:, 1:] == 7).all()


def test_memory_is_counted_and_given_back() -> None:
    """Each state has its own dtype; ``state_bytes`` is the memory divided by its slots."""
    model = Hybrid()
    cache = StateCache(model, 5, CPU, torch.bfloat16, 2)
    first = model.first.states
    assert first is not None
    assert (first["conv"].dtype, first["scan"].dtype) == (torch.bfloat16, torch.float32)
    assert [tuple(each.shape) for each in first.values()] == [(5, 8, 2), (5, 2, 4, 4)]
    assert cache.nbytes == 5 * state_bytes(model, torch.bfloat16) == 5 * 2 * (16 * 2 + 32 * 4)
    with pytest.raises(RuntimeError, match="states already"):
        StateCache(model, 1, CPU, torch.float32)
    cache.close()
    assert [layer.states for layer in state_layers(model)] == [None, None]
    assert cache.nbytes == 0
    with pytest.raises(ValueError, match=r"no memory for .* 384 bytes .* max_num_seqs"):
        StateCache(model, 2**50, CPU, torch.float32)
    assert model.first.states is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of states without their own
def test_states_are_moved_in_the_order_of_the_field(dtype: torch.dtype) -> None:
    """To the host, on the device (all read before any is written), and from the host.

    The host stays the host where a program has set another default device.
    """
    model = Hybrid()
    with torch.device("meta"):
        cache = StateCache(model, 4, CPU, dtype, 2)
    for states in cache._states:
        for slot in range(4):
            states[:, slot] = slot
    read = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            result = function(*args, **kwargs or {})
            read.append(result.nbytes if function is torch.ops.aten.index_select.default else 0)
            return result

    with torch.device("meta"), Allocations():
        cache.move(Moves([(1, 0)], [(0, 1), (2, 0)], [(0, 2)]))
    assert max(read) == 2 * copy_bytes(model, dtype), "more than a layer's states at once"
    for states in cache._states:
        held = [states[:, slot].unique().tolist() for slot in range(4)]
        assert held == [[2.0], [0.0], [1.0], [3.0]]


@pytest.mark.parametrize(
    ("page", "left", "pages"), [(2, 11, 5), (2, -1, 0), (0, 0, 40), (0, -1, 0)]
)
def test_pages_have_the_memory_that_states_leave(page: int, left: int, pages: int) -> None:
    """Pages of a model without attention layers take none."""
    worker = Worker.__new__(Worker)
    worker.config, worker.page_bytes = EngineConfig(max_num_seqs=8), page
    worker._memory = lambda max_model_len: left  # type: ignore[method-assign]
    assert worker.pages(80) == pages


@pytest.mark.parametrize(
    ("page", "state", "swap_space", "states", "rest"),
    [
        (2**20, 2**20, 1.0, 8, 2**30 - 8 * 2**20),
        (2**20, 2**27, 1.0, 4, 2**29),
        (2**20, 2**20, 0.0, 0, 0),
        (0, 2**20, 1.0, 0, 2**30),
        (2**20, 0, 1.0, 0, 2**30),
    ],
)
def test_states_take_at_most_half_of_the_host_memory(
    page: int, state: int, swap_space: float, states: int, rest: int
) -> None:
    """Pages have the rest; without attention layers no sequence is preempted."""
    worker = Worker.__new__(Worker)
    worker.config = EngineConfig(max_num_seqs=8, swap_space=swap_space)
    worker.page_bytes, worker.state_bytes = page, state
    assert (worker.host_states, worker.host_bytes) == (states, rest)


@pytest.mark.parametrize(
    ("asked", "state", "caches", "slots"),
    [
        (None, 0, True, 16),
        (False, 0, False, 8),
        (None, 9, False, 8),
        (False, 9, False, 8),
        (True, 9, True, 16),
    ],
)
def test_states_are_saved_only_where_that_is_asked_for(
    asked: bool | None, state: int, caches: bool, slots: int
) -> None:
    """They take as much memory again as the states of sequences."""
    worker = Worker.__new__(Worker)
    worker.config = EngineConfig(max_num_seqs=8, enable_prefix_caching=asked)
    worker.state_bytes = state
    assert (worker.caches_prefixes, worker.num_states) == (caches, slots)
    saved = " and as many saved ones of prefixes" if caches else ""
    assert worker.describe_states() == f"8 states of sequences{saved}"


@pytest.mark.parametrize(("caching", "slots"), [(None, 2), (True, 4)])
def test_a_worker_releases_states_when_it_closes(caching: bool | None, slots: int) -> None:
    """Then it can start again, as after a sleep."""
    worker = Worker.__new__(Worker)
    worker._adapter_rows = AdapterRows()
    worker.config = EngineConfig(max_num_seqs=2, swap_space=0.01, enable_prefix_caching=caching)
    worker.model = Hybrid()
    worker.device, worker.cache_dtype, worker._shape = CPU, torch.float32, None
    worker.source = SimpleNamespace(dtype=torch.float32)  # type: ignore[assignment]
    worker._all_ranks = 1
    worker.page_bytes, worker.state_bytes = 2**10, state_bytes(worker.model, torch.float32)
    for _ in range(2):
        worker.start(3, 3, 16)
        assert [len(each) for each in state_layers(worker.model)[0].states.values()] == [slots] * 2
        assert worker.states._host[0].shape[1] == 2
        worker.close()
        assert [layer.states for layer in state_layers(worker.model)] == [None, None]

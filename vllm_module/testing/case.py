"""A drawn case of a law, and the decorator that turns a check into a law.

Hypothesis draws the module's arguments, the tensor-parallel size and a seed. A failure shrinks to
the smallest case, and its message names the parameter.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from random import Random
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from hypothesis import Phase, given, note, reject, settings
from hypothesis import strategies as st
from torch import nn

from vllm_module.build.stages import divide
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import PipelineStage, run_ranks, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.testing.checkpoints import Tensors, made_up_weights
from vllm_module.testing.poison import poisoned_memory
from vllm_module.testing.strategies import tp_sizes

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Inputs = Callable[[vLLMModule], tuple[Any, ...] | dict[str, Any]]


class Law(Protocol):
    """A law of loading: a function that tests a module against one promise.

    Args:
        build: a class or function that builds the module.
        *args, **kwargs: arguments of ``build``, each a value or a Hypothesis strategy.
        inputs: a function from the unsharded module to the arguments of ``forward``, the same on
            every rank: a tuple, or a dict by name. By default a causal language model (a module
            with ``compute_logits``) gets token ids and positions; a module without ``forward``
            needs none.

    Returns the number of cases tried, which Hypothesis' settings choose.

    Raises:
        AssertionError: the module breaks the law. The message names the parameter, and Hypothesis
            prints the smallest failing case.

    """

    __name__: str

    def __call__(
        self,
        build: Callable[..., vLLMModule],
        *args: Any,
        inputs: Inputs | None = None,
        **kwargs: Any,
    ) -> int:
        """Test modules that ``build`` returns against the law."""


class Case:
    """A drawn example: a way to build the module, and a checkpoint for it."""

    def __init__(
        self, data: st.DataObject, build: Callable[[], vLLMModule], inputs: Inputs | None
    ) -> None:
        self._data = data
        self._build = build
        self._inputs = inputs
        self._built: dict[int, vLLMModule] = {}
        self.sizes: tuple[int, int] | None = None  # size drawn, and size used

    def draw(self, strategy: st.SearchStrategy[T], label: str) -> T:
        """Draw a value, which a failure prints under ``label``."""
        return self._data.draw(strategy, label)

    @cached_property
    def seed(self) -> int:
        """Seed of all tensor values, and of ``choose`` and ``some``."""
        return self.draw(st.integers(0, 2**16 - 1), "seed")

    @cached_property
    def random(self) -> Random:
        """Random generator for choices that need no shrinking; its probabilities are equal."""
        return Random(self.seed)

    def choose(self, options: Sequence[T], label: str) -> T:
        """Choose one of ``options``, which a failure prints under ``label``."""
        chosen = self.random.choice(options)
        note(f"{label}: {chosen!r}")
        return chosen

    def some(self, options: Sequence[T], label: str, least: int = 1, most: int = 99) -> list[T]:
        """Choose ``least`` to ``most`` of ``options``, without repetition."""
        count = self.random.randint(least, min(most, len(options)))
        chosen = self.random.sample(options, count)
        note(f"{label}: {chosen!r}")
        return chosen

    def build(self, rank: int = 0, size: int = 1, stage: PipelineStage | None = None) -> vLLMModule:
        """Build the module of rank ``rank`` of ``size``, or a stage of it, without weights."""
        with tensor_parallel(rank=rank, size=size):
            return self._new(stage)

    def _new(self, stage: PipelineStage | None) -> vLLMModule:
        module: object = self._build()
        if not isinstance(module, vLLMModule):
            raise TypeError(f"build must return a new vLLMModule each time, got {module!r}")
        if id(module) in self._built:
            raise TypeError("build returned one module twice: it must make a new one each time")
        self._built[id(module)] = module
        if stage is not None:
            divide(module, stage)
        return module.eval()

    @cached_property
    def whole(self) -> vLLMModule:
        """Unsharded module, which is never loaded."""
        return self.build()

    @cached_property
    def tensors(self) -> Tensors:
        """Checkpoint with random values for every name that the module expects."""
        if not self.whole.expected_weights():
            raise ValueError(
                f"{type(self.whole).__name__} expects no weights: the laws of loading do not apply"
            )
        return made_up_weights(self.whole, seed=self.seed)

    def other_tensors(self) -> Tensors:
        """Return another checkpoint of the same names and shapes."""
        return made_up_weights(self.whole, seed=self.seed + 1)

    @cached_property
    def overridden(self) -> bool:
        """True if a module of the tree overrides ``load_weights``, and may transform weights."""
        return any(
            type(module).load_weights is not vLLMModule.load_weights
            for module in self.whole.modules()
            if isinstance(module, vLLMModule)
        )

    @cached_property
    def size(self) -> int:
        """Tensor-parallel size: the drawn one, or the next smaller one that the module accepts.

        Every rank must refuse the other sizes, with the numbers in the message.
        """
        if (world := world_size()) is not None:
            if not self._accepts(world):
                reject()
            return world
        drawn = self.draw(tp_sizes(), "tensor-parallel size")
        size = self.accepted(drawn)
        self.sizes = drawn, size
        if size != drawn:
            note(f"the module refuses {drawn} ranks and accepts {size}")
        return size

    def accepted(self, drawn: int) -> int:
        """Return the largest number of ranks up to ``drawn`` that the module accepts."""
        return next(size for size in range(drawn, 0, -1) if self._accepts(size))

    @cached_property
    def rank(self) -> int:
        """Rank that the law checks."""
        return self.choose(range(self.size), "rank")

    def _accepts(self, size: int) -> bool:
        refusals = []
        ranks = {0, size - 1}
        for rank in ranks:
            try:
                self.build(rank, size)
            except ShardingError as error:
                refusals.append(str(error))
        assert len(refusals) in (0, len(ranks)), f"one of {size} ranks refuses: {refusals}"
        for refusal in refusals:
            assert size > 1, f"the module cannot even be built for one rank: {refusal}"
            assert any(map(str.isdigit, refusal)), f"refused without the numbers: {refusal}"
        return not refusals

    def at(self) -> str:
        """Return a text such as ``rank 0 of 2``, for messages."""
        return f"rank {self.rank} of {self.size}"

    def on_every_rank(
        self, work: Callable[[vLLMModule], T], stage: PipelineStage | None = None
    ) -> list[T]:
        """Run ``work`` on every rank's module at the same time, and return the results by rank.

        With ``stage``, the modules are those of one stage. Ranks are threads, or the processes of
        an initialized process group.
        """
        if world_size() is None:
            # Modules are built one by one, because a constructor may set the process's default
            # dtype.
            modules = [self.build(rank, self.size, stage) for rank in range(self.size)]
            return run_ranks(self.size, lambda rank: work(modules[rank]))
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, _outcome(lambda: work(self._new(stage))))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @cached_property
    def inputs(self) -> tuple[Any, ...] | dict[str, Any] | None:
        """Arguments of ``forward``; ``None`` if the module has no ``forward``."""
        module: Any = self.whole
        if self._inputs is not None:
            if not callable(self._inputs):
                raise TypeError(
                    "inputs must be a function of the module, such as inputs=lambda module: "
                    f"(torch.randn(3, 8),), got {type(self._inputs).__name__}"
                )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # every process must draw the same inputs
                inputs = self._inputs(module)
            if not isinstance(inputs, tuple | dict):
                raise TypeError(
                    "inputs must return a tuple of forward's arguments, or a dict by name, got "
                    f"{type(inputs).__name__}: write (x,) for one tensor"
                )
            return inputs
        if type(module).forward is nn.Module.forward:
            return None
        if not hasattr(module, "compute_logits"):
            raise ValueError(
                f"{type(module).__name__} is no causal language model: pass the arguments of its "
                "forward, such as inputs=lambda module: (torch.randn(3, 8),)"
            )
        most: int | None = getattr(module.config, "max_position_embeddings", None)
        positions = torch.arange(min(5, most or 5))
        return positions * 7919 % module.config.vocab_size, positions

    @property
    def is_decoder(self) -> bool:
        """Whether the module is a causal language model that takes metadata, as in an engine."""
        module: Any = self.whole
        if self._inputs is not None or not hasattr(module, "compute_logits"):
            return False
        try:
            inspect.signature(module.forward).bind("input_ids", "positions", "metadata")
        except TypeError:  # it has other arguments
            return False
        return True

    def run(self, module: Any) -> list[Any]:
        """Run a loaded module; return its outputs, or a language model's logits, as a flat list."""
        assert self.inputs is not None
        return list(_flat(forward(module, self.inputs)))


def forward(module: Any, inputs: tuple[Any, ...] | dict[str, Any]) -> Any:
    """Return what a loaded module computes: logits, or what a stage passes on to the next one."""
    inputs = copy.deepcopy(inputs)  # forward may write to its arguments
    with torch.no_grad():
        outputs = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        if hasattr(module, "compute_logits") and not isinstance(outputs, tuple):
            outputs = module.compute_logits(outputs)
    return outputs


def _flat(outputs: Any) -> Iterator[Any]:
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    if isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _flat(output)
    else:
        yield outputs


def law(check: Callable[[Case], None]) -> Law:
    """Make a law of ``check``, which raises ``AssertionError`` if a case breaks the law."""

    @wraps(check)
    def hold(
        build: Callable[..., vLLMModule], *args: Any, inputs: Inputs | None = None, **kwargs: Any
    ) -> int:
        tried = 0
        sizes: set[tuple[int, int]] = set()

        # Stop at the first failure, without runs that find which draws matter. No deadline, because
        # it would depend on the machine.
        phases = [phase for phase in settings().phases if phase is not Phase.explain]

        @settings(report_multiple_bugs=False, deadline=None, phases=phases)
        @given(st.data())
        def one_case(data: st.DataObject) -> None:
            nonlocal tried
            drawn = [_draw(data, arg, f"argument {i}") for i, arg in enumerate(args)]
            named = {name: _draw(data, value, name) for name, value in kwargs.items()}
            case = Case(data, lambda: build(*drawn, **named), inputs)
            with poisoned_memory():
                check(case)
            tried += 1
            if case.sizes is not None:
                sizes.add(case.sizes)

        # The digest separates the cases and database entries of laws and modules, as pytest's
        # parameters do. Addresses differ from run to run, so they are left out.
        identity = re.sub("0x[0-9a-f]+", "", f"{check.__name__} {build!r} {args!r} {kwargs!r}")
        digest = hashlib.sha256(identity.encode()).digest()
        one_case.hypothesis.inner_test._hypothesis_internal_add_digest = digest  # type: ignore[attr-defined]
        one_case()
        refused = {drawn for drawn, _ in sizes if drawn > 1}
        assert len(refused) < 4 or any(used > 1 for _, used in sizes), (
            f"every tensor-parallel size but 1 was refused, in {tried} cases: {sorted(refused)}"
        )
        return tried

    return hold


def _draw(data: st.DataObject, value: Any, label: str) -> Any:
    return data.draw(value, label) if isinstance(value, st.SearchStrategy) else value


def refusal(kind: type[E] | tuple[type[E], ...], load: Callable[[], object], otherwise: str) -> E:
    """Return the error that ``load`` raises; fail with ``otherwise`` if it raises none."""
    try:
        load()
    except kind as error:
        return error
    raise AssertionError(otherwise)


def world_size() -> int | None:
    """Return the number of processes in the process group; ``None`` without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _outcome(work: Callable[[], T]) -> T | BaseException:
    """Return the result of ``work``, or its error, which every rank then raises."""
    try:
        return work()
    except Exception as error:
        return error

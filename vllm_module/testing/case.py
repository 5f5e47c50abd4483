"""One drawn case of a law, and what turns a check of a case into a law.

Hypothesis draws what the module is built with, the tensor-parallel size and whatever else the law
asks for; a failure shrinks to the smallest of them, and its message names the parameter.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from random import Random
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from torch import nn

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.module import vLLMModule
from vllm_module.testing.checkpoints import Tensors, random_weights
from vllm_module.testing.poison import poisoned_memory
from vllm_module.testing.strategies import tp_sizes

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Inputs = Callable[[vLLMModule], tuple[Any, ...] | dict[str, Any]]


class Law(Protocol):
    """A law of loading, to be held against a module.

    Args:
        build: builds the module: a class or a function.
        *args, **kwargs: what ``build`` takes, each a value or a Hypothesis strategy to draw it.
        inputs: given the unsharded module, returns what ``forward`` takes, the same on every
            rank: a tuple, or a dict by name. A causal language model (one with
            ``compute_logits``) gets token ids and positions unless this is given; a module without
            a ``forward`` needs none.

    Returns the number of cases tried, which Hypothesis' settings choose.

    Raises:
        AssertionError: the module breaks the law; the message names the parameter, and
            Hypothesis prints the smallest case that does.

    """

    __name__: str

    def __call__(
        self,
        build: Callable[..., vLLMModule],
        *args: Any,
        inputs: Inputs | None = None,
        **kwargs: Any,
    ) -> int:
        """Hold the law against what ``build`` builds."""


class Case:
    """What one example has drawn: how to build the module, and a checkpoint for it."""

    def __init__(
        self, data: st.DataObject, build: Callable[[], vLLMModule], inputs: Inputs | None
    ) -> None:
        self._data = data
        self._build = build
        self._inputs = inputs
        self._built: dict[int, vLLMModule] = {}
        self.sizes: tuple[int, int] | None = None  # drawn, and taken

    def draw(self, strategy: st.SearchStrategy[T], label: str) -> T:
        """Draw something that a failure then shows under ``label``."""
        return self._data.draw(strategy, label)

    @cached_property
    def seed(self) -> int:
        """Decides the values of tensors and all choices below that."""
        return self.draw(st.integers(0, 2**16 - 1), "seed")

    @cached_property
    def random(self) -> Random:
        """Makes choices that need no shrinking, and evenly, which Hypothesis does not aim at."""
        return Random(self.seed)

    def choose(self, options: Sequence[T], label: str) -> T:
        """Choose one of ``options``, which a failure then shows under ``label``."""
        chosen = self.random.choice(options)
        note(f"{label}: {chosen!r}")
        return chosen

    def some(self, options: Sequence[T], label: str, least: int = 1, most: int = 99) -> list[T]:
        """Choose ``least`` to ``most`` of ``options``, each once."""
        count = self.random.randint(least, min(most, len(options)))
        chosen = self.random.sample(options, count)
        note(f"{label}: {chosen!r}")
        return chosen

    def build(self, rank: int = 0, size: int = 1) -> vLLMModule:
        """Build rank ``rank`` of ``size``, not loaded."""
        with tensor_parallel(rank=rank, size=size):
            return self._new()

    def _new(self) -> vLLMModule:
        module: object = self._build()
        if not isinstance(module, vLLMModule):
            raise TypeError(f"build must return a new vLLMModule each time, got {module!r}")
        if id(module) in self._built:
            raise TypeError("build returned one module twice: it must make a new one each time")
        self._built[id(module)] = module
        return module.eval()

    @cached_property
    def whole(self) -> vLLMModule:
        """The unsharded module, never loaded."""
        return self.build()

    @cached_property
    def tensors(self) -> Tensors:
        """A checkpoint for the module: random values under every name it expects."""
        expected = self.whole.expected_weights()
        if not expected:
            raise ValueError(
                f"{type(self.whole).__name__} expects no weights: no law of loading concerns it"
            )
        return random_weights(expected, seed=self.seed)

    def other_tensors(self) -> Tensors:
        """Another checkpoint of the same names and shapes."""
        return random_weights(self.whole.expected_weights(), seed=self.seed + 1)

    @cached_property
    def overridden(self) -> bool:
        """Whether some ``load_weights`` of the tree may transform what it is given."""
        return any(
            type(module).load_weights is not vLLMModule.load_weights
            for module in self.whole.modules()
            if isinstance(module, vLLMModule)
        )

    @cached_property
    def size(self) -> int:
        """A tensor-parallel size: the one drawn, or the next smaller that the module takes.

        Sizes that it does not take have to be refused on every rank, with the numbers.
        """
        if (world := world_size()) is not None:
            if not self._takes(world):
                reject()
            return world
        drawn = self.draw(tp_sizes(), "tensor-parallel size")
        size = next(size for size in range(drawn, 0, -1) if self._takes(size))
        self.sizes = drawn, size
        if size != drawn:
            note(f"{drawn} ranks cannot share this module, {size} can")
        return size

    @cached_property
    def rank(self) -> int:
        """One of the ranks."""
        return self.choose(range(self.size), "rank")

    def _takes(self, size: int) -> bool:
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
        """Say which rank this is, for messages."""
        return f"rank {self.rank} of {self.size}"

    def on_every_rank(self, work: Callable[[vLLMModule], T]) -> list[T]:
        """Run ``work`` with each rank's module at once, and return what it returned, by rank.

        The ranks are threads here, or, in an initialized process group, its processes.
        """
        if world_size() is None:
            # Built one after another: a constructor may set what is the process's, such as a dtype.
            modules = [self.build(rank, self.size) for rank in range(self.size)]
            return run_ranks(self.size, lambda rank: work(modules[rank]))
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, _outcome(lambda: work(self._new())))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @cached_property
    def inputs(self) -> tuple[Any, ...] | dict[str, Any] | None:
        """What ``forward`` takes, ``None`` if the module has none."""
        module: Any = self.whole
        if self._inputs is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # every process draws the same
                inputs = self._inputs(module)
            if not isinstance(inputs, tuple | dict):
                raise TypeError(
                    "inputs must return a tuple of what forward takes, or a dict by name, got "
                    f"{type(inputs).__name__}: write (x,) for one tensor"
                )
            return inputs
        if type(module).forward is nn.Module.forward:
            return None
        if not hasattr(module, "compute_logits"):
            raise ValueError(
                f"{type(module).__name__} is no causal language model: say what its forward "
                "takes, such as inputs=lambda module: (torch.randn(3, 8),)"
            )
        positions = torch.arange(5)
        return positions * 7919 % module.config.vocab_size, positions

    def run(self, module: Any) -> list[Any]:
        """Run a loaded module and return its outputs, flat; logits, of a language model."""
        inputs = copy.deepcopy(self.inputs)  # forward may write to them
        assert inputs is not None
        with torch.no_grad():
            outputs = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            if hasattr(module, "compute_logits"):
                outputs = module.compute_logits(outputs)
        return list(_flat(outputs))


def _flat(outputs: Any) -> Iterator[Any]:
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    if isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _flat(output)
    else:
        yield outputs


def law(check: Callable[[Case], None]) -> Law:
    """Make a law of ``check``, which raises ``AssertionError`` for a case that breaks it."""

    @wraps(check)
    def hold(
        build: Callable[..., vLLMModule], *args: Any, inputs: Inputs | None = None, **kwargs: Any
    ) -> int:
        tried = 0
        sizes: set[tuple[int, int]] = set()

        # One failure at a time, plainly; and no clock, which would be the machine's.
        @settings(report_multiple_bugs=False, deadline=None)
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

        # As pytest's parameters do: or all laws would draw the same cases, and drop each other's
        # failures from the database. Addresses differ from run to run.
        identity = re.sub("0x[0-9a-f]+", "", f"{check.__name__} {build!r} {args!r} {kwargs!r}")
        digest = hashlib.sha256(identity.encode()).digest()
        one_case.hypothesis.inner_test._hypothesis_internal_add_digest = digest  # type: ignore[attr-defined]
        one_case()
        refused = {drawn for drawn, _ in sizes if drawn > 1}
        assert len(refused) < 4 or any(taken > 1 for _, taken in sizes), (
            f"every tensor-parallel size but 1 was refused, in {tried} cases: {sorted(refused)}"
        )
        return tried

    return hold


def _draw(data: st.DataObject, value: Any, label: str) -> Any:
    return data.draw(value, label) if isinstance(value, st.SearchStrategy) else value


def refusal(kind: type[E] | tuple[type[E], ...], load: Callable[[], object], otherwise: str) -> E:
    """Return the error of this kind that ``load`` raises; where it does not, fail."""
    try:
        load()
    except kind as error:
        return error
    raise AssertionError(otherwise)


def world_size() -> int | None:
    """Return the number of real processes, ``None`` outside of a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _outcome(work: Callable[[], T]) -> T | BaseException:
    """Return what ``work`` raises, so that every rank raises it and Hypothesis goes on in step."""
    try:
        return work()
    except Exception as error:
        return error

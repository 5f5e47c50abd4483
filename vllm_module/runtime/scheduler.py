"""Which tokens of which sequences a step computes, and where their keys and values go."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from vllm_module.runtime.page_pool import ROOT, PagePool
from vllm_module.runtime.sequence import Request, Sequence


@dataclass
class Step:
    """What is computed together, and the pages that are copied before, in this order.

    Attributes:
        scheduled: sequences, and how many of their next tokens.
        swapped_out, copied, swapped_in: pairs of pages, from and to.

    """

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Continuous batching: whatever has tokens to compute goes on, first come, first served.

    A sequence that decodes has one token to compute, a prompt all of its own, in chunks where the
    step is full. Where pages run out, the sequence that came last gives up its own, and starts
    over later (or is swapped to host memory and back); the first therefore always goes on.

    Args:
        pool: pages of the cache; host: of the memory that sequences are swapped to.
        max_num_seqs: sequences in a step at most.
        max_num_batched_tokens: tokens in a step at most.
        prefix_caching: whether prompts begin with the pages of others that began alike.
        window: tokens back that any layer sees; older pages are given back. ``None`` for all.

    """

    def __init__(
        self,
        pool: PagePool,
        host: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.pool, self.host = pool, host
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.window = window
        self.waiting: list[Sequence] = []  # both in the order of arrival
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait for its turn, which is that of its request's arrival."""
        insort(self.waiting, sequence, key=_turn)

    def fork(self, request: Request) -> None:
        """Make the request's other samples of its first one, whose pages they share."""
        first = request.sequences[0]
        while len(request.sequences) < request.params.n:
            sequence = request.new_sequence()
            sequence.computed, sequence.pages = first.computed, list(first.pages)
            sequence.remembered, sequence.prefix = first.remembered, first.prefix
            sequence.left_behind = first.left_behind
            self.pool.hold(page for page in sequence.pages if page >= 0)
            request.sequences.append(sequence)
            insort(self.running, sequence, key=_turn)

    def finish(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, whatever it was doing, and give its pages back."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._give_back(sequence)
        self.host.release(sequence.host_pages)
        sequence.host_pages = []

    def reset(self) -> None:
        """Let everything go, whatever state it is in."""
        self.waiting, self.running = [], []
        self.pool.reset()
        self.host.reset()

    def forget(self) -> None:
        """Let no prompt begin with pages of before, as after an update of the weights."""
        self.pool.forget_everything()
        for sequence in (*self.running, *self.waiting):
            sequence.prefix = self.pool.new_prefix()  # which no other sequence has

    def schedule(self) -> Step:
        """Choose what the next step computes; its pages are taken."""
        step = Step()
        budget = self.max_num_batched_tokens
        preempted = self.preemptions
        position = 0
        while position < len(self.running) and budget and position < self.max_num_seqs:
            sequence = self.running[position]
            count = min(sequence.remaining, budget)
            if not self._make_room(sequence, count, step):
                break  # it was the last, and gave up its own pages
            step.scheduled.append((sequence, count))
            budget -= count
            position += 1
        while (
            self.waiting
            and budget
            and preempted == self.preemptions
            and len(self.running) < self.max_num_seqs
        ):
            sequence = self.waiting[0]
            if not self._admit(sequence, step):
                break
            del self.waiting[0]
            insort(self.running, sequence, key=_turn)
            count = min(sequence.remaining, budget)
            admitted = self._grow(sequence, count, step)
            assert admitted, "room for all of its tokens was there"
            step.scheduled.append((sequence, count))
            budget -= count
        return step

    def computed(self, step: Step) -> None:
        """Take note that the step's tokens have their keys and values in the cache."""
        size = self.pool.page_size
        for sequence, count in step.scheduled:
            sequence.computed += count
            while self.prefix_caching and sequence.computed >= (sequence.remembered + 1) * size:
                first = sequence.remembered * size
                tokens = sequence.tokens[first : first + size]
                page = sequence.pages[sequence.remembered]
                sequence.prefix = self.pool.remember(page, sequence.prefix, tokens)
                sequence.remembered += 1
            if self.window is not None:
                self._leave_behind(sequence, self.window)

    def _leave_behind(self, sequence: Sequence, window: int) -> None:
        """Give back pages that no token to come will see."""
        unseen = max(0, sequence.computed - window + 1) // self.pool.page_size
        while sequence.left_behind < min(unseen, len(sequence.pages)):
            page = sequence.pages[sequence.left_behind]
            self.pool.release([page])
            sequence.pages[sequence.left_behind] = -1
            sequence.left_behind += 1

    def _make_room(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Grow ``sequence``, at the cost of those that came last; whether it is still running."""
        while not self._grow(sequence, count, step):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Take the pages that the next ``count`` tokens need; whether there were enough."""
        pool, pages = self.pool, sequence.pages
        needed = pool.pages_for(sequence.computed + count) - len(pages)
        written = sequence.computed // pool.page_size  # the first page that is written to
        shared = written < len(pages) and pool.holders(pages[written]) > 1
        if needed + shared > pool.free_pages:
            return False
        if shared:  # with samples of the same prompt, which keep what is on it
            (own,) = pool.take(1)
            step.copied.append((pages[written], own))
            pool.release([pages[written]])
            pages[written] = own
        if needed > 0:
            pages += pool.take(needed)
        return True

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence what is there of its pages, if the rest would fit as well."""
        pool = self.pool
        total = pool.pages_for(len(sequence.tokens))
        if sequence.host_pages:
            held = [index for index, page in enumerate(sequence.pages) if page >= 0]
            if total - len(sequence.pages) + len(held) > pool.free_pages:
                return False
            pages = pool.take(len(held))
            step.swapped_in += zip(sequence.host_pages, pages, strict=True)
            for index, page in zip(held, pages, strict=True):
                sequence.pages[index] = page
            self.host.release(sequence.host_pages)
            sequence.host_pages = []
            return True
        pages, prefix = [], ROOT
        if self.prefix_caching and sequence.request.params.prompt_logprobs is None:
            # One token at least is left to compute, for what comes after it.
            whole = (len(sequence.tokens) - 1) // pool.page_size
            pages, prefix = pool.find(sequence.tokens, whole)
        unheld = sum(not pool.holders(page) for page in pages)
        if total - len(pages) + unheld > pool.free_pages:
            return False
        pool.hold(pages)
        sequence.pages, sequence.prefix = pages, prefix
        sequence.remembered = len(pages)
        sequence.computed = len(pages) * pool.page_size
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        held = [page for page in sequence.pages if page >= 0]
        if held and len(held) <= self.host.free_pages:
            sequence.host_pages = self.host.take(len(held))
            step.swapped_out += zip(held, sequence.host_pages, strict=True)
            self.pool.release(held)
        else:
            self._give_back(sequence)
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Let the sequence's pages go, the last first: its beginning is more likely of use."""
        if not sequence.host_pages:
            self.pool.release(page for page in reversed(sequence.pages) if page >= 0)
        sequence.pages = []
        sequence.remembered, sequence.prefix, sequence.left_behind = 0, ROOT, 0


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index

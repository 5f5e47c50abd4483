"""Scheduling: choosing the tokens of each step, and allocating pages for them."""

from __future__ import annotations

import time
from bisect import insort
from operator import attrgetter

from vllm_module.runtime.cache.allocator import Allocator
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.routed_experts import RoutedExperts
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.served_adapter import ServedAdapter
from vllm_module.runtime.step_inputs import Step

_BY_ARRIVAL = attrgetter("request.arrival", "index")  # sort key of sequences


class Scheduler(Allocator):
    """Continuous batching, first come, first served.

    Every step has all running sequences that fit into it. There are no phases: a decoding sequence
    has one token to compute, and a prefilling one has its whole prompt, which is cut into chunks
    when the step is full.

    When pages run out, the sequence that came last is preempted: its pages are freed. It is
    computed again later, or continues if its pages could be swapped to host memory. The first
    sequence is never preempted, and every sequence becomes the first at some time, so none starves.

    With ``has_states``, layers keep a state of each running sequence, in the slot that is its row
    of the block tables. So a sequence keeps its row while it runs, and no more run than there are
    rows. A state cannot be advanced twice: see :meth:`start_over`.

    With ``prefix_caching`` too, states after prefixes are saved in as many slots more, and a prompt
    reuses pages only up to a saved state. A step ends where one is to be saved: at the last page
    end of a prompt that leaves a token to compute, and where the prompt parts from what is cached.

    With ``batches`` of more than one, :meth:`schedule` is called before the step that it returned
    last is finished, and takes a share of the other sequences. Those in flight are not preempted.

    Args:
        pool: pages of the cache.
        host: pages in host memory that sequences are swapped to.
        max_num_seqs: largest number of sequences in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        prefix_caching: True if a prompt reuses the pages of earlier sequences with the same start.
        window: the widest sliding window of all layers, in tokens; pages before it are freed.
            ``None`` if a layer attends to all tokens.
        has_states: True if layers keep a state of each sequence.
        host_states: number of states in host memory, for sequences that are swapped out.
        max_loras: most adapters of running sequences; those of another one wait in turn.
        batches: most steps in flight, each of other sequences: as many as a pipeline has stages.
        routed: keeps the experts that tokens go to, if somebody wants them.

    """

    def __init__(
        self,
        pool: PagePool,
        host: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        window: int | None = None,
        *,
        has_states: bool = False,
        host_states: int = 0,
        max_loras: int = 8,
        batches: int = 1,
        routed: RoutedExperts | None = None,
    ) -> None:
        super().__init__(pool, host, max_num_seqs, prefix_caching, has_states, host_states)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window, self.max_loras, self.batches = window, max_loras, batches
        self.in_flight: set[Sequence] = set()  # with several batches
        self.waiting: list[Sequence] = []  # in the order of arrival, as the running ones
        self.preemptions, self.routed = 0, routed

    def schedule(self) -> Step:
        """Choose the sequences and tokens of the next step, and allocate their pages."""
        step = Step()
        budget = self.max_num_batched_tokens
        preemptions, admits = self.preemptions, True
        most = min(len(self.running) + len(self.waiting), self.max_num_seqs)
        most = -(-most // self.batches)
        position = 0
        while position < len(self.running) and budget and len(step.scheduled) < most:
            sequence = self.running[position]
            if sequence in self.in_flight:
                position += 1
                continue
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            if sequence.saved_at:
                count = min(count, sequence.saved_at[0] - sequence.num_computed)
            needs_pages = sequence.num_computed + count > sequence.num_writable
            if needs_pages and not self._allocate_or_preempt(sequence, count, step):
                admits = False
                break
            if sequence.row < 0:
                self._take_row(sequence, step)
            step.scheduled.append((sequence, count))
            budget -= count
            position += 1
        if admits and self.preemptions == preemptions:  # else pages are short
            while (
                self.waiting
                and budget
                and len(self.running) < self.max_num_seqs
                and len(step.scheduled) < most
            ):
                count = self._start(self.waiting[0], budget, step)
                if not count:
                    break
                budget -= count
        if step.scheduled:  # an empty step is not run
            step.states.copied += [(first, row) for row, first in self._forked.items()]
            self._forked.clear()
            if self.has_states:
                step.saved += self.saved.copies()
            if self.batches > 1:
                self.in_flight.update(sequence for sequence, _ in step.scheduled)
        return step

    def schedule_alone(self, sequence: Sequence, end: int) -> Step | None:
        """Schedule a step of ``sequence`` alone, which computes its tokens up to ``end`` at most.

        A waiting sequence starts from its first token. Returns None, and changes nothing, if too
        few pages are free.
        """
        step = Step()
        if sequence.row < 0:
            most = min(end, self.max_num_batched_tokens)
            if not self._start(sequence, most, step, reuse=False):
                return None
        else:
            end = min([end, *sequence.saved_at[:1]])
            count = min(end - sequence.num_computed, self.max_num_batched_tokens)
            if not self._allocate(sequence, count, step):
                return None
            step.scheduled.append((sequence, count))
        step.saved += self.saved.copies()
        return step

    def schedule_next(self, sequences: list[Sequence]) -> Step | None:
        """Schedule the step after one that is launched and not finished, which gives each a token.

        In it, each of ``sequences`` computes that token, whose value is not known here. The other
        running sequences end with the launched step. Returns None, and changes nothing, if
        :meth:`schedule` would admit a waiting sequence after that step, or preempt one.
        """
        assert not self.saved.waiting, "a prompt that is not complete has no next token"
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        if self.waiting and (
            len(sequences) < len(self.running)  # the pages that the others free may suffice
            or (len(self.running) < most and self._fits(self.waiting[0]))
        ):
            return None
        growing = [each for each in sequences if len(each.tokens) >= each.num_writable]
        if len(growing) > self.pool.free_pages:
            return None
        step = Step([(sequence, 1) for sequence in sequences])
        for sequence in growing:
            # With the launched step's token.
            count = len(sequence.tokens) + 1 - sequence.num_computed
            allocated = self._allocate(sequence, count, step)
            assert allocated, "each takes one page, and so many are free"
        assert not step.pages.copied, "the launched step has copied the pages that it writes"
        return step

    def note_launched(self, step: Step) -> None:
        """Record that a step is launched: its pages are in the block tables of all ranks."""
        for sequence, _ in step.scheduled:
            sequence.num_listed_pages = len(sequence.pages)
        if self.routed is not None:
            step.routed = self.routed.copy(sum(count for _, count in step.scheduled))

    def mark_computed(self, step: Step) -> None:
        """Record that the step's tokens are in the cache; cache full pages for other prompts."""
        size = self.pool.page_size
        if self.in_flight:
            self.in_flight.difference_update(sequence for sequence, _ in step.scheduled)
        if self.routed is not None:
            self.routed.keep(step)
        for sequence, count in step.scheduled:
            if sequence.finish_reason is not None:
                continue  # the sequence ended after the launch
            sequence.num_computed += count
            if sequence.num_computed % size >= count and self.window is None:
                continue  # no further page is full
            full = sequence.num_computed // size if self.prefix_caching else 0
            cached = sequence.num_cached_pages
            while sequence.num_cached_pages < full:
                index = sequence.num_cached_pages
                tokens = sequence.tokens[index * size : (index + 1) * size]
                page = sequence.pages[index]
                salt = sequence.salt if index == 0 else None
                sequence.prefix = self.pool.cache(page, sequence.prefix, tokens, salt)
                sequence.num_cached_pages += 1
            if self.routed is not None:
                self.routed.keep_pages(sequence, cached)
            if sequence.saved_at and sequence.num_computed == sequence.saved_at[0]:
                self.saved.save(sequence.prefix, sequence.row)
                del sequence.saved_at[0]
            if self.window is not None:
                self._free_passed_pages(sequence, self.window)

    def add(self, sequence: Sequence) -> None:
        """Add ``sequence`` to the waiting ones, in the order of arrival."""
        insort(self.waiting, sequence, key=_BY_ARRIVAL)

    def fork(self, request: Request) -> None:
        """Add the request's other samples, which share the pages of its first sequence.

        The next step copies its state to them.
        """
        first = request.sequences[0]
        first.num_writable = 0
        while len(request.sequences) < request.params.n:
            sequence = request.new_sequence()
            if self.has_states:
                # No row to copy a state to: this sample computes the prompt again.
                if not self._free_rows:
                    request.sequences.append(sequence)
                    self.add(sequence)
                    continue
                self._take_row(sequence, Step())
                self._forked[sequence.row] = first.row
            sequence.num_computed, sequence.pages = first.num_computed, list(first.pages)
            sequence.num_cached_pages, sequence.prefix = first.num_cached_pages, first.prefix
            sequence.salt = first.salt
            sequence.num_passed_pages = first.num_passed_pages
            self.pool.share(page for page in sequence.pages if page >= 0)
            if first.routed:
                sequence.add_routed(first.routed_experts())  # it may end with its first token
            request.sequences.append(sequence)
            insort(self.running, sequence, key=_BY_ARRIVAL)

    def finish(self, sequence: Sequence) -> None:
        """Remove ``sequence``, running or waiting, and free its pages."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.in_flight.discard(sequence)
        self._free_pages(sequence)
        if sequence.host_pages:
            self._free_host(sequence)

    def undo(self, step: Step) -> None:
        """Compute again what a step that is not run was to copy."""
        swapped = {target for _, target in step.pages.swapped_out}
        for sequence in self.waiting:
            if swapped.intersection(sequence.host_pages):
                self._free_pages(sequence)
                self._free_host(sequence)
        if step.pages.copied or step.states.copied:
            self.start_over()
        self.saved.forget_all()

    def start_over(self, *, swapped: bool = False) -> None:
        """Move every running sequence back to the waiting ones, to compute all of its tokens again.

        This follows a step that failed or was dropped, if layers have states: the step may have
        advanced any of them. Saved states stay, because no step advances them. With ``swapped``,
        sequences that are swapped out to host memory are computed again, too.
        """
        self.in_flight.clear()
        for sequence in self.waiting:
            if swapped and sequence.host_pages:
                self._free_pages(sequence)
                self._free_host(sequence)
        for sequence in list(self.running):
            self.running.remove(sequence)
            self._free_pages(sequence)
            self.add(sequence)

    def take_over(self, before: Scheduler) -> None:
        """Take the sequences of another scheduler, to compute all of their tokens again here."""
        self.preemptions = before.preemptions + len(before.running)
        for sequence in before.running:
            sequence.request.metrics.num_preemptions += 1
        for sequence in (*before.running, *before.waiting):
            before.finish(sequence)
            self.add(sequence)

    def reset(self) -> None:
        """Remove all sequences and free all pages, even after a failure in the middle of a step."""
        self.waiting, self.running = [], []
        self.in_flight.clear()
        self.pool.reset()
        self.host.reset()
        self._free_all()

    def reset_prefix_cache(self) -> None:
        """Evict all cached pages, so that later prompts reuse none, as after a weight update."""
        self.pool.evict_all()
        self.saved.forget_all()
        for sequence in (*self.running, *self.waiting):
            sequence.prefix = self.pool.new_prefix()  # no prompt can find this prefix
            sequence.saved_at = []

    def _fits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence could be admitted."""
        if sequence.request.adapter is not None and not self._adapter_fits(sequence):
            return False
        if sequence.host_pages:
            return self._swap_fits(sequence)
        return self._find_pages(sequence) is not None

    def running_adapters(self) -> set[ServedAdapter]:
        """Return the adapters of running sequences."""
        return {each.request.adapter for each in self.running if each.request.adapter is not None}

    def _adapter_fits(self, sequence: Sequence) -> bool:
        """Return whether the running sequences have few enough adapters with this one's."""
        running = self.running_adapters()
        return sequence.request.adapter in running or len(running) < self.max_loras

    def _start(self, sequence: Sequence, most: int, step: Step, *, reuse: bool = True) -> int:
        """Start a waiting sequence, with at most ``most`` tokens in the step.

        Unless ``reuse``, no cached pages are reused. Returns the number of tokens; it is 0, and
        nothing has changed, if too few pages are free, or running sequences have other adapters.
        """
        if sequence.request.adapter is not None and not self._adapter_fits(sequence):
            return 0
        if not self._admit(sequence, step, reuse=reuse):
            return 0
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_BY_ARRIVAL)
        count = min(len(sequence.tokens) - sequence.num_computed, most)
        if sequence.saved_at:
            count = min(count, sequence.saved_at[0] - sequence.num_computed)
        allocated = self._allocate(sequence, count, step)
        assert allocated, "_admit made sure that the pages for all its tokens are free"
        self._take_row(sequence, step)
        if sequence.host_state >= 0:
            step.states.swapped_in.append((sequence.host_state, sequence.row))
            self._free_host_state(sequence)
        elif self.has_states and sequence.num_computed:
            step.saved.append((self.saved.use(sequence.prefix), sequence.row))
        step.scheduled.append((sequence, count))
        metrics = sequence.request.metrics
        metrics.scheduled_ts = metrics.scheduled_ts or time.monotonic()
        return count

    def _allocate_or_preempt(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Allocate, preempting the last sequences if needed; False if it was preempted itself.

        Those in flight are not preempted, nor is one before them. If that leaves too few pages,
        nothing changes, and the result is False: pages may be free after the steps in flight.
        """
        while not self._allocate(sequence, count, step):
            if self.in_flight and not self._suffices_behind(sequence, count):
                return False
            last = self.running[-1]
            self._preempt(last, step)
            if last is sequence:
                return False
        return True

    def _suffices_behind(self, sequence: Sequence, count: int) -> bool:
        """Return whether pages suffice once all are preempted that came after those in flight.

        Nothing may be preempted in vain: an empty step is not run, and swaps no page out.
        """
        pool = self.pool
        missing = pool.pages_for(sequence.num_computed + count) - len(sequence.pages)
        missing += 1 - pool.free_pages  # one more if a page is copied on write
        for other in reversed(self.running):
            if missing <= 0 or other is sequence or other in self.in_flight:
                break
            missing -= sum(page >= 0 and pool.reference_count(page) == 1 for page in other.pages)
        return missing <= 0

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Preempt a running sequence; swap its pages to the host if that has enough."""
        self.preemptions += 1
        sequence.request.metrics.num_preemptions += 1
        self.running.remove(sequence)
        if not self._swap_out(sequence, step):
            self._free_pages(sequence)
        self.add(sequence)

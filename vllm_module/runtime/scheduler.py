"""Scheduling: choosing the tokens of each step, and allocating pages for them."""

from __future__ import annotations

import time
from bisect import insort
from heapq import heappop, heappush
from operator import attrgetter

from vllm_module.runtime.cache.page_pool import ROOT, PagePool
from vllm_module.runtime.cache.saved_states import SavedStates
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step

_BY_ARRIVAL = attrgetter("request.arrival", "index")  # sort key of sequences


class Scheduler:
    """Continuous batching, first come, first served.

    Every step has all running sequences that fit into it. There are no phases: a decoding sequence
    has one token to compute, and a prefilling one has its whole prompt, which is cut into chunks
    when the step is full.

    When pages run out, the sequence that came last is preempted: its pages are freed. It is
    computed
    again later, or continues if its pages could be swapped to host memory. The first sequence is
    never preempted, and every sequence becomes the first at some time, so none starves.

    With ``has_states``, layers keep a state of each running sequence, in the slot that is its row
    of the block tables. So a sequence keeps its row while it runs, and no more run than there are
    rows. A state cannot be advanced twice: see :meth:`start_over`.

    With ``prefix_caching`` too, states after prefixes are saved in as many slots more, and a prompt
    reuses pages only up to a saved state. A step ends where one is to be saved: at the last page
    end of a prompt that leaves a token to compute, and where the prompt parts from what is cached.

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

    Attributes:
        saved: saved states for later prompts.

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
    ) -> None:
        self.has_states, self.host_states = has_states, host_states
        self.pool, self.host = pool, host
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.window = window
        self.waiting: list[Sequence] = []  # both lists are in the order of arrival
        self.running: list[Sequence] = []
        self.preemptions = 0
        saves_states = has_states and prefix_caching
        self.saved = SavedStates(max_num_seqs, max_num_seqs if saves_states else 0)
        if saves_states:
            pool.evicted = self.saved.forget
        self._free_all()

    def _free_all(self) -> None:
        # A heap, because the tables of neighbouring rows are a view.
        self._free_rows = list(range(self.max_num_seqs))
        self._free_host_states = list(range(self.host_states))
        # Rows of new samples, with the rows that have their states.
        self._forked: dict[int, int] = {}
        self.saved.forget_all()

    def schedule(self) -> Step:
        """Choose the sequences and tokens of the next step, and allocate their pages."""
        step = Step()
        budget = self.max_num_batched_tokens
        preemptions = self.preemptions
        position = 0
        while position < len(self.running) and budget and position < self.max_num_seqs:
            sequence = self.running[position]
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            if sequence.saved_at:
                count = min(count, sequence.saved_at[0] - sequence.num_computed)
            needs_pages = sequence.num_computed + count > sequence.num_writable
            if needs_pages and not self._allocate_or_preempt(sequence, count, step):
                break
            if sequence.row < 0:
                self._take_row(sequence)
            step.scheduled.append((sequence, count))
            budget -= count
            position += 1
        step.states.copied += [(first, row) for row, first in self._forked.items()]
        self._forked.clear()
        if self.preemptions == preemptions:  # else pages are short, and nothing is admitted
            while self.waiting and budget and len(self.running) < self.max_num_seqs:
                count = self._start(self.waiting[0], budget, step)
                if not count:
                    break
                budget -= count
        if step.scheduled:  # an empty step is not run
            step.saved += self.saved.copies()
        return step

    def schedule_alone(self, sequence: Sequence, end: int) -> Step | None:
        """Schedule a step of ``sequence`` alone, which computes its tokens up to ``end`` at most.

        A waiting sequence starts from its first token. Returns None, and changes nothing, if too
        few
        pages are free.
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
        assert not step.copied, "the launched step has copied the pages that it writes"
        return step

    def mark_listed(self, step: Step) -> None:
        """Record that the step's pages are in the block tables of all ranks.

        If the step fails, this is not called, and the pages are sent again.
        """
        for sequence, _ in step.scheduled:
            sequence.num_listed_pages = len(sequence.pages)

    def mark_computed(self, step: Step) -> None:
        """Record that the step's tokens are in the cache; cache full pages for other prompts."""
        size = self.pool.page_size
        for sequence, count in step.scheduled:
            if sequence.finish_reason is not None:
                continue  # the sequence ended after the launch
            sequence.num_computed += count
            if sequence.num_computed % size >= count and self.window is None:
                continue  # no further page is full
            full = sequence.num_computed // size if self.prefix_caching else 0
            while sequence.num_cached_pages < full:
                index = sequence.num_cached_pages
                tokens = sequence.tokens[index * size : (index + 1) * size]
                page = sequence.pages[index]
                salt = sequence.request.cache_salt if index == 0 else None
                sequence.prefix = self.pool.cache(page, sequence.prefix, tokens, salt)
                sequence.num_cached_pages += 1
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
                self._take_row(sequence)
                self._forked[sequence.row] = first.row
            sequence.num_computed, sequence.pages = first.num_computed, list(first.pages)
            sequence.num_cached_pages, sequence.prefix = first.num_cached_pages, first.prefix
            sequence.num_passed_pages = first.num_passed_pages
            self.pool.share(page for page in sequence.pages if page >= 0)
            request.sequences.append(sequence)
            insort(self.running, sequence, key=_BY_ARRIVAL)

    def finish(self, sequence: Sequence) -> None:
        """Remove ``sequence``, running or waiting, and free its pages."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._free_pages(sequence)
        self.host.free(sequence.host_pages)
        sequence.host_pages = []
        self._free_host_state(sequence)

    def start_over(self) -> None:
        """Move every running sequence back to the waiting ones, to compute all of its tokens again.

        This follows a step that failed or was dropped, if layers have states: the step may have
        advanced
        any of them. Saved states stay, because no step advances them.
        """
        for sequence in list(self.running):
            self.running.remove(sequence)
            self._free_pages(sequence)
            self.add(sequence)

    def reset(self) -> None:
        """Remove all sequences and free all pages, even after a failure in the middle of a step."""
        self.waiting, self.running = [], []
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
        if sequence.host_pages:
            return self._swap_fits(sequence)
        return self._find_pages(sequence) is not None

    def _start(self, sequence: Sequence, most: int, step: Step, *, reuse: bool = True) -> int:
        """Start a waiting sequence, with at most ``most`` tokens in the step.

        Unless ``reuse``, no cached pages are reused. Returns the number of tokens; it is 0, and
        nothing has changed, if too few pages are free.
        """
        if not self._admit(sequence, step, reuse=reuse):
            return 0
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_BY_ARRIVAL)
        count = min(sequence.remaining, most)
        if sequence.saved_at:
            count = min(count, sequence.saved_at[0] - sequence.num_computed)
        allocated = self._allocate(sequence, count, step)
        assert allocated, "_admit made sure that the pages for all its tokens are free"
        self._take_row(sequence)
        if sequence.host_state >= 0:
            step.states.swapped_in.append((sequence.host_state, sequence.row))
            self._free_host_state(sequence)
        elif self.has_states and sequence.num_computed:
            step.saved.append((self.saved.use(sequence.prefix), sequence.row))
        step.scheduled.append((sequence, count))
        metrics = sequence.request.metrics
        metrics.scheduled_ts = metrics.scheduled_ts or time.monotonic()
        return count

    def _admit(self, sequence: Sequence, step: Step, *, reuse: bool) -> bool:
        """Assign pages to a waiting sequence; return whether pages for all its tokens are free."""
        if sequence.host_pages:
            return self._swap_in(sequence, step)
        found = self._find_pages(sequence, reuse=reuse)
        if found is None:
            return False
        reused, num_known = found
        sequence.pages = [page for page, _ in reused]
        self.pool.share(sequence.pages)
        sequence.prefix = reused[-1][1] if reused else ROOT
        sequence.num_cached_pages = len(reused)
        size = self.pool.page_size
        sequence.num_computed = len(reused) * size
        if len(sequence.tokens) == sequence.request.prompt_len and not sequence.index:
            sequence.request.num_cached_tokens = sequence.num_computed
        if self.has_states and self.prefix_caching:
            ends = {num_known, (sequence.request.prompt_len - 1) // size}
            sequence.saved_at = sorted(end * size for end in ends if end > len(reused))
        return True

    def _find_pages(
        self, sequence: Sequence, *, reuse: bool = True
    ) -> tuple[list[tuple[int, int]], int] | None:
        """Return the cached pages to reuse, each with its prefix, and the number of cached pages.

        With states, that number is larger if no state is saved after the last page. Returns None if
        too few other pages are free.
        """
        pool = self.pool
        found: list[tuple[int, int]] = []
        if self.prefix_caching and reuse and sequence.request.params.prompt_logprobs is None:
            # The last token is always computed, because its logits give the next one.
            limit = (len(sequence.tokens) - 1) // pool.page_size
            found = pool.find_cached(sequence.tokens, limit, sequence.request.cache_salt)
        num_known = len(found)
        while found and self.has_states and found[-1][1] not in self.saved:
            found.pop()
        free_and_cached = sum(not pool.reference_count(page) for page, _ in found)
        needed = pool.pages_for(len(sequence.tokens)) - len(found)
        return None if needed + free_and_cached > pool.free_pages else (found, num_known)

    def _swap_fits(self, sequence: Sequence) -> bool:
        """Return whether pages for all tokens of a sequence in host memory are free."""
        growth = self.pool.pages_for(len(sequence.tokens)) - len(sequence.pages)
        return len(sequence.host_pages) + growth <= self.pool.free_pages

    def _swap_in(self, sequence: Sequence, step: Step) -> bool:
        """Copy a sequence's pages back from the host, if pages for all its tokens are free."""
        if not self._swap_fits(sequence):
            return False
        swapped = [index for index, page in enumerate(sequence.pages) if page >= 0]
        pages = self.pool.allocate(len(swapped))
        step.swapped_in += zip(sequence.host_pages, pages, strict=True)
        for index, page in zip(swapped, pages, strict=True):
            sequence.pages[index] = page
        self.host.free(sequence.host_pages)
        sequence.host_pages = []
        return True

    def _allocate_or_preempt(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Allocate, preempting the last sequences if needed; False if it was preempted itself."""
        while not self._allocate(sequence, count, step):
            last = self.running[-1]
            self._preempt(last, step)
            if last is sequence:
                return False
        return True

    def _allocate(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Allocate pages for the next ``count`` tokens; return whether enough are free."""
        pool, pages = self.pool, sequence.pages
        needed = pool.pages_for(sequence.num_computed + count) - len(pages)
        # Index of the first page that is written to.
        written = sequence.num_computed // pool.page_size
        shared = written < len(pages) and pool.reference_count(pages[written]) > 1
        if needed + shared > pool.free_pages:
            return False
        if shared:  # copy on write: other samples of the prompt share the page
            (copy,) = pool.allocate(1)
            step.copied.append((pages[written], copy))
            pool.free([pages[written]])
            pages[written] = copy
            sequence.num_listed_pages = min(sequence.num_listed_pages, written)
        if needed > 0:
            pages += pool.allocate(needed)
        sequence.num_writable = len(pages) * pool.page_size
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Preempt a running sequence; swap its pages to the host if that has enough."""
        self.preemptions += 1
        sequence.request.metrics.num_preemptions += 1
        self.running.remove(sequence)
        pages = [page for page in sequence.pages if page >= 0]
        stateless = not self.has_states
        if pages and len(pages) <= self.host.free_pages and (stateless or self._free_host_states):
            self._swap_out_state(sequence, step)
            # ``sequence.pages`` stays: _swap_in replaces the entries that are not -1.
            sequence.host_pages = self.host.allocate(len(pages))
            step.swapped_out += zip(pages, sequence.host_pages, strict=True)
            self.pool.free(pages)
            self._free_row(sequence)
        else:
            self._free_pages(sequence)
        self.add(sequence)

    def _swap_out_state(self, sequence: Sequence, step: Step) -> None:
        """Copy a sequence's state to the host; a new sample's is that of its first sample."""
        if self.has_states:
            sequence.host_state = heappop(self._free_host_states)
            row = self._forked.get(sequence.row, sequence.row)
            step.states.swapped_out.append((row, sequence.host_state))

    def _free_host_state(self, sequence: Sequence) -> None:
        if sequence.host_state >= 0:
            heappush(self._free_host_states, sequence.host_state)
        sequence.host_state = -1

    def _take_row(self, sequence: Sequence) -> None:
        """Assign a row of the block tables to ``sequence``.

        There may be more samples than rows (``max_num_seqs``). Then the last sequence with a row
        loses it; it is not in this step, which has fewer sequences than rows. With states this does
        not occur.
        """
        if not self._free_rows:
            assert not self.has_states, "no more sequences run than there are rows"
            self._free_row(next(each for each in reversed(self.running) if each.row >= 0))
        sequence.row = heappop(self._free_rows)

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            heappush(self._free_rows, sequence.row)
            self._forked.pop(sequence.row, None)
        sequence.row, sequence.num_listed_pages = -1, 0

    def _free_passed_pages(self, sequence: Sequence, window: int) -> None:
        """Free pages whose tokens are outside of the window of all later tokens."""
        passed = max(0, sequence.num_computed - window + 1) // self.pool.page_size
        while sequence.num_passed_pages < min(passed, len(sequence.pages)):
            index = sequence.num_passed_pages
            self.pool.free([sequence.pages[index]])
            sequence.pages[index] = -1
            sequence.num_passed_pages += 1

    def _free_pages(self, sequence: Sequence) -> None:
        """Free the sequence's pages, the last first, because a prompt reuses the first ones.

        Pages freed first are allocated first, which evicts them.
        """
        if not sequence.host_pages:
            self.pool.free(page for page in reversed(sequence.pages) if page >= 0)
        sequence.pages = []
        sequence.num_cached_pages, sequence.prefix, sequence.num_passed_pages = 0, ROOT, 0
        self._free_row(sequence)

"""Allocating pages, rows of the block tables and states to sequences, and freeing them."""

from __future__ import annotations

from heapq import heappop, heappush

from vllm_module.runtime.cache.page_pool import ROOT, PagePool
from vllm_module.runtime.cache.saved_states import SavedStates
from vllm_module.runtime.sequence import Sequence
from vllm_module.runtime.step_inputs import Step


class Allocator:
    """Allocates pages, rows of the block tables and states to sequences, and frees them.

    Args:
        pool, host, max_num_seqs, prefix_caching, has_states, host_states: as for
            :class:`~vllm_module.runtime.scheduler.Scheduler`.

    Attributes:
        running: sequences that have pages on the device, in the order of arrival.
        saved: saved states for later prompts.

    """

    def __init__(
        self,
        pool: PagePool,
        host: PagePool,
        max_num_seqs: int,
        prefix_caching: bool,
        has_states: bool,
        host_states: int,
    ) -> None:
        self.pool, self.host = pool, host
        self.max_num_seqs = max_num_seqs
        self.prefix_caching = prefix_caching
        self.has_states, self.host_states = has_states, host_states
        self.running: list[Sequence] = []
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

    def _find_pages(
        self, sequence: Sequence, *, reuse: bool = True
    ) -> tuple[list[tuple[int, int]], int] | None:
        """Return the cached pages to reuse, each with its prefix, and the number of cached pages.

        With states, that number is larger if no state is saved after the last page. Returns None if
        too few other pages are free. An adapter that was updated while the sequence waited has
        other pages from then on.
        """
        pool, request = self.pool, sequence.request
        salt, adapter = request.cache_salt, request.adapter
        sequence.salt = salt if adapter is None else adapter.salt(salt)
        found: list[tuple[int, int]] = []
        if self.prefix_caching and reuse and request.params.prompt_logprobs is None:
            # The last token is always computed, because its logits give the next one.
            limit = (len(sequence.tokens) - 1) // pool.page_size
            found = pool.find_cached(sequence.tokens, limit, sequence.salt)
        num_known = len(found)
        while found and self.has_states and found[-1][1] not in self.saved:
            found.pop()
        free_and_cached = sum(not pool.reference_count(page) for page, _ in found)
        needed = pool.pages_for(len(sequence.tokens)) - len(found)
        return None if needed + free_and_cached > pool.free_pages else (found, num_known)

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
        if sequence.request.num_cached_tokens is None:  # later, pages may be its own
            sequence.request.num_cached_tokens = sequence.num_computed
        if self.has_states and self.prefix_caching:
            ends = {num_known, (sequence.request.prompt_len - 1) // size}
            sequence.saved_at = sorted(end * size for end in ends if end > len(reused))
        return True

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
        step.pages.swapped_in += zip(sequence.host_pages, pages, strict=True)
        for index, page in zip(swapped, pages, strict=True):
            sequence.pages[index] = page
        self.host.free(sequence.host_pages)
        sequence.host_pages = []
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
            step.pages.copied.append((pages[written], copy))
            pool.free([pages[written]])
            pages[written] = copy
            sequence.num_listed_pages = min(sequence.num_listed_pages, written)
        if needed > 0:
            pages += pool.allocate(needed)
        sequence.num_writable = len(pages) * pool.page_size
        return True

    def _swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Move a sequence's pages and state to the host, if both are free there.

        A new sample's state is that of its first sample.
        """
        pages = [page for page in sequence.pages if page >= 0]
        if not pages or len(pages) > self.host.free_pages:
            return False
        if self.has_states:
            if not self._free_host_states:
                return False
            sequence.host_state = heappop(self._free_host_states)
            row = self._forked.get(sequence.row, sequence.row)
            step.states.swapped_out.append((row, sequence.host_state))
        # ``sequence.pages`` stays: _swap_in replaces the entries that are not -1.
        sequence.host_pages = self.host.allocate(len(pages))
        step.pages.swapped_out += zip(pages, sequence.host_pages, strict=True)
        self.pool.free(pages)
        self._free_row(sequence)
        return True

    def _free_host(self, sequence: Sequence) -> None:
        """Free what a sequence that is swapped out has in host memory."""
        self.host.free(sequence.host_pages)
        sequence.host_pages = []
        self._free_host_state(sequence)

    def _free_host_state(self, sequence: Sequence) -> None:
        if sequence.host_state >= 0:
            heappush(self._free_host_states, sequence.host_state)
        sequence.host_state = -1

    def _take_row(self, sequence: Sequence, step: Step) -> None:
        """Assign a row of the block tables to ``sequence``.

        There may be more samples than rows (``max_num_seqs``). Then the last sequence with a row
        that is not in this step loses it. With states this does not occur.
        """
        if not self._free_rows:
            assert not self.has_states, "no more sequences run than there are rows"
            taken = [each for each, _ in step.scheduled]
            others = (each for each in reversed(self.running) if each not in taken)
            self._free_row(next(each for each in others if each.row >= 0))
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

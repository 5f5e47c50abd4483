"""Which pages of a KV cache are whose, and what is on those that nobody holds any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0  # of all prefixes: no page comes before


class PagePool:
    """Pages, counted by their holders. One that is let go keeps what is on it until it is needed.

    Whole pages of tokens can be remembered by what is on them and before them. A remembered prefix
    is a chain of numbers, each for a page of tokens after another prefix, so that a prefix is found
    by its tokens themselves and nothing is mistaken for anything else.

    Args:
        num_pages: pages in all.
        page_size: tokens a page.

    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Free all pages, whoever held them, and forget what is on them."""
        self._holders = [0] * self.num_pages
        # Free pages, the one that is taken next first; a dict, to take one out of the middle.
        self._free = dict.fromkeys(range(self.num_pages))
        self._remembered: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # page, prefix
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # by page
        self._next_prefix = ROOT

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold ``page``."""
        return self._holders[page]

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages that are now held once; what was on them is forgotten.

        Raises ``RuntimeError`` where fewer are free.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} pages are needed and {len(self._free)} are free")
        pages = []
        for _ in range(count):
            page = next(iter(self._free))
            del self._free[page]
            self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages once more each."""
        for page in pages:
            if not self._holders[page]:
                del self._free[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Let pages go, of which the first are taken again first."""
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is let go, and nobody holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None

    def remember(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Remember that ``page`` holds ``tokens`` after the prefix ``before``; return that prefix.

        Where another page holds the same already, that one stays the one that is found.
        """
        key = (before, tuple(tokens))
        if (found := self._remembered.get(key)) is not None:
            return found[1]
        prefix = self.new_prefix()
        self._remembered[key] = (page, prefix)
        self._keys[page] = key
        return prefix

    def new_prefix(self) -> int:
        """Return a prefix that nothing is after yet."""
        self._next_prefix += 1
        return self._next_prefix

    def find(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return pages that hold the beginning of ``tokens``, ``most`` at most, and their prefix.

        They are not held yet: call :meth:`hold` before anything is taken.
        """
        pages: list[int] = []
        prefix, size = ROOT, self.page_size
        while len(pages) < most:
            first = len(pages) * size
            found = self._remembered.get((prefix, tuple(tokens[first : first + size])))
            if found is None:
                break
            page, prefix = found
            pages.append(page)
        return pages, prefix

    def forget_everything(self) -> None:
        """Forget what is on all pages, as after an update of the weights."""
        self._remembered.clear()
        self._keys.clear()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._remembered[key]

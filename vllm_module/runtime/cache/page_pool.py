"""Reference counts of the KV cache's pages, and an index of pages that later prompts can reuse.

A page holds the keys and values of ``page_size`` consecutive tokens of one sequence. In the field,
in our public API and in the kernels, a page is called a block: ``block_size``, ``block_tables``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

ROOT = 0  # the empty prefix, with which every sequence starts
_Tokens = tuple[Hashable, ...]  # tokens of a page; a sequence's first page may end with a salt


class PagePool:
    """Reference counts of pages, and an index of cached pages by their tokens.

    :meth:`allocate` gives a page its first reference, :meth:`share` adds one and :meth:`free`
    removes one. A page without references is free, and keeps its content until it is allocated
    again.

    :meth:`cache` puts a full page into the index. A prefix is a number that stands for all tokens
    up to the end of a page. The index maps (prefix, tokens of the next page) to (page, prefix with
    that page): a trie that compares the tokens themselves, so no hash collision can return the page
    of another text.

    Args:
        num_pages: number of all pages.
        page_size: tokens per page.

    Attributes:
        evicted: function that :meth:`allocate` calls with the prefix that ends with an evicted
            page.

    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.evicted: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Free all pages and evict all cached ones."""
        self._reference_counts = [0] * self.num_pages
        # Free pages in order of allocation. Sharing removes pages from the middle; in a plain dict,
        # finding the first key takes longer the more keys before it were deleted.
        self._free = OrderedDict.fromkeys(range(self.num_pages))
        self._cached: dict[tuple[int, _Tokens], tuple[int, int]] = {}
        self._keys: dict[int, tuple[int, _Tokens]] = {}  # index keys of cached pages
        self._last_prefix = ROOT

    @property
    def free_pages(self) -> int:
        """Number of pages without references."""
        return len(self._free)

    def reference_count(self, page: int) -> int:
        """Return the number of references to ``page``."""
        return self._reference_counts[page]

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free pages, with one reference each; cached ones are evicted.

        Raises ``RuntimeError`` if fewer are free.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} pages are needed and {len(self._free)} are free")
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            key = self._keys.pop(page, None)
            if key is not None:
                _, prefix = self._cached.pop(key)
                if self.evicted is not None:
                    self.evicted(prefix)
            self._reference_counts[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which may be free and cached."""
        for page in pages:
            if not self._reference_counts[page]:
                del self._free[page]
            self._reference_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page; pages freed first are allocated first.

        Raises ``RuntimeError`` for a page without references.
        """
        for page in pages:
            if not self._reference_counts[page]:
                raise RuntimeError(f"page {page} is freed, and has no references")
            self._reference_counts[page] -= 1
            if not self._reference_counts[page]:
                self._free[page] = None

    def cache(self, page: int, prefix: int, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Cache ``page``, which holds ``tokens`` after ``prefix``; return the longer prefix.

        A sequence's first page is found only with the same ``salt``. If another page is cached with
        the same tokens, that page stays in the index.
        """
        key = (prefix, _salted(tokens, salt))
        if (cached := self._cached.get(key)) is not None:
            return cached[1]
        extended = self.new_prefix()
        self._cached[key] = (page, extended)
        self._keys[page] = key
        return extended

    def find_cached(
        self, tokens: Sequence[int], limit: int, salt: Hashable = None
    ) -> list[tuple[int, int]]:
        """Return cached pages that hold the first of ``tokens``, each with the prefix it ends.

        There are at most ``limit``, of sequences with the same ``salt``. Call :meth:`share` on the
        pages before allocating anything, which could evict them.
        """
        found: list[tuple[int, int]] = []
        prefix, size = ROOT, self.page_size
        while len(found) < limit:
            start = len(found) * size
            page_tokens = _salted(tokens[start : start + size], None if found else salt)
            cached = self._cached.get((prefix, page_tokens))
            if cached is None:
                break
            found.append(cached)
            prefix = cached[1]
        return found

    def new_prefix(self) -> int:
        """Return a prefix that no cached page continues."""
        self._last_prefix += 1
        return self._last_prefix

    def evict_all(self) -> None:
        """Remove all pages from the index; references stay."""
        self._cached.clear()
        self._keys.clear()


def _salted(tokens: Sequence[int], salt: Hashable) -> _Tokens:
    """Return the tokens of a page as an index key, which differs for pages with another salt."""
    return tuple(tokens) if salt is None else (*tokens, salt)

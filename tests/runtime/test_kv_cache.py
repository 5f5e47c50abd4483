"""Pages: each belongs to one sequence at a time, and none is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.layers import Attention
from vllm_module.runtime.kv_cache import KVCache

CPU = torch.device("cpu")


def cache_of(model: torch.nn.Module, pages: int, page_size: int) -> KVCache:
    return KVCache(model, pages, page_size, CPU, torch.float32)  # type: ignore[arg-type]


STEPS = st.lists(
    st.one_of(
        st.integers(0, 3),  # free this sequence
        st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1),  # append to these
    ),
    max_size=20,
)


@given(STEPS, st.integers(1, 12), st.integers(1, 5))
def test_every_token_keeps_a_slot_of_its_own(
    steps: list[int | dict[int, int]], pages: int, page_size: int
) -> None:
    """Whatever is appended and freed, live tokens share no slot, and every page is accounted."""
    cache = cache_of(torch.nn.Module(), pages, page_size)
    slots: dict[int, list[int]] = {}
    for step in steps:
        if isinstance(step, int):
            cache.free(step)
            slots.pop(step, None)
        else:
            lengths = {s: len(slots.get(s, [])) + n for s, n in step.items()}
            full = sum(-(-len(kept) // page_size) for s, kept in slots.items() if s not in step)
            if full + sum(-(-n // page_size) for n in lengths.values()) > pages:
                with pytest.raises(RuntimeError, match="free pages"):
                    cache.append(step)
            else:
                metadata = cache.append(step)
                new = metadata.slot_mapping.tolist()
                starts = metadata.query_start_loc.tolist()
                for row, sequence in enumerate(step):
                    slots.setdefault(sequence, []).extend(new[starts[row] : starts[row + 1]])
                    # The table leads to the slots that the tokens were put into.
                    table = metadata.block_tables[row].tolist()
                    assert slots[sequence] == [
                        table[i // page_size] * page_size + i % page_size
                        for i in range(lengths[sequence])
                    ]
                assert metadata.context_lens.tolist() == list(lengths.values())
        live = [slot for kept in slots.values() for slot in kept]
        assert len(set(live)) == len(live)
        assert all(0 <= slot < pages * page_size for slot in live)
        held = sum(-(-len(kept) // page_size) for kept in slots.values())
        assert cache.free_pages == pages - held


def test_a_full_cache_says_what_is_missing() -> None:
    """The refusal has the numbers, and what other sequences hold stays."""
    cache = cache_of(torch.nn.Module(), 2, 4)
    cache.append({0: 4})
    with pytest.raises(RuntimeError, match="1 free pages of 4 tokens, and this step needs 2"):
        cache.append({0: 1, 1: 3})
    assert cache.free_pages == 1
    assert cache.append({0: 1}).context_lens.tolist() == [5]


def test_layers_get_the_cache_and_give_it_back(model: vLLMModule) -> None:
    """Each attention layer holds pages of its own heads until the cache is closed."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    cache = cache_of(model, 3, 16)
    caches = [layer.kv_cache for layer in layers]
    assert [tuple(c.shape) for c in caches if c is not None] == [(2, 3, 16, 2, 16)] * 2
    cache.close()
    assert [layer.kv_cache for layer in layers] == [None, None]

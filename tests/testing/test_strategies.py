"""What the laws draw: each form that a checkpoint may have is among the draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import find, settings

from vllm_module.testing.strategies import DimLayout, dim_layouts


def alternates(layout: DimLayout) -> bool:
    return layout.groups is not None and layout.groups > 1


FORMS: dict[str, Callable[[DimLayout], bool]] = {
    "one slot": lambda drawn: len(drawn.slots) == 1,
    "slots stored apart": lambda drawn: len(drawn.slots) == 3 and drawn.groups is None,
    "slots stored as one tensor": lambda drawn: drawn.groups == 1,
    "a slot with padding": lambda drawn: any(s.size < s.padded for s in drawn.slots),
    "a slot as pairs beside another": lambda drawn: (
        {bool(s.pairs) for s in drawn.slots} == {True, False}
    ),
    "a slot that more ranks share than another": lambda drawn: (
        len({s.most_parts for s in drawn.slots}) > 1 and not alternates(drawn)
    ),
    "alternating slots": alternates,
    "alternating slots, of which ranks share one": lambda drawn: (
        alternates(drawn) and drawn.slots[0].most_parts > drawn.slots[-1].most_parts
    ),
    "alternating slots with padding": lambda drawn: (
        alternates(drawn) and all(s.size < s.padded for s in drawn.slots)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_dimension_is_drawn(form: str) -> None:
    find(dim_layouts(), FORMS[form], settings=settings(max_examples=2000, database=None))

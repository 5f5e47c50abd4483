"""Tables of facts, as a notebook's parser and a terminal's reader see them."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.base.summary import Summarized

PIECES = ["<b>", "</td>", "<", ">", "&lt;", "&", "'", '"', "name", " ", "é"]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1).map("".join)


class Told(Summarized):
    def __init__(self, given: list[tuple[str, str]]) -> None:
        self._given = given

    def facts(self) -> list[tuple[str, str]]:
        return self._given


class Cells(HTMLParser):
    """Collects the tags that a table has, and the text of each cell."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.cells: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1][-1] += data


@settings(max_examples=200)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_a_notebook_shows_each_fact_as_it_is(facts: list[tuple[str, str]]) -> None:
    """Names of a checkpoint are in it, which anybody may have written: none becomes a tag."""
    parser = Cells()
    parser.feed(Told(facts)._repr_html_())
    parser.close()
    assert parser.cells == [list(each) for each in facts]
    assert parser.tags == ["table", "caption", *["tr", "th", "td"] * len(facts)]


def test_a_terminal_shows_values_below_each_other() -> None:
    assert repr(Told([("a", "1"), ("long name", "2")])) == "Told\n  a          1\n  long name  2"

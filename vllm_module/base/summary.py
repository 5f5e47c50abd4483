"""Tables of facts about an object: text for a terminal, HTML for a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape


class Summarized(ABC):
    """A base class whose ``repr`` and notebook display are a table of facts."""

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Return pairs of a name and a value."""

    def __repr__(self) -> str:
        facts = self.facts()
        width = max(len(name) for name, _ in facts)
        lines = [f"  {name:{width}}  {value}" for name, value in facts]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        """Return the table as HTML (IPython's display protocol)."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self.facts()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def mebibytes(nbytes: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{nbytes / 2**20:,.1f} MiB"

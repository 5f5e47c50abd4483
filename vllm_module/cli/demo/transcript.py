"""The lines that the demo prints: numbered steps, tables and check marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from vllm_module.cli.output import folded, print_table, print_text, printable_lines

_BAR = "   │ "


@dataclass
class Transcript:
    """The demo's output: numbered steps, and a check mark at each result that was checked."""

    out: Console
    step: int = 0

    def title(self, text: str) -> None:
        """Start the next step."""
        self.step += 1
        self.out.print()
        print_text(self.out, f"{self.step}. {text}", "bold", indent="   ")

    def line(self, text: str) -> None:
        """Print a line that was not checked."""
        print_text(self.out, f"   {text}")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], right: int) -> None:
        """Print a table that was not checked; the numbers of column ``right`` are aligned."""
        print_table(self.out, header, rows, right=[right], indent="     ")

    def ok(self, text: str) -> None:
        """Print a result that was checked."""
        print_text(self.out, f"   ✓ {text}")

    def quote(self, text: str, indent: str = "") -> None:
        """Print a longer text with a bar at its left, and ``indent`` where a line is folded."""
        rows = folded(printable_lines(text), min(self.out.width, 80) - len(_BAR), indent)
        for row in rows.split("\n"):
            self.out.print(f"{_BAR}{row}", style="dim")

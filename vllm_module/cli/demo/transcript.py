from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from vllm_module.cli.output import printable_lines

_WIDTH = 75  # of quoted text; with its margin it fits 80 columns


@dataclass
class Transcript:
    """The demo's output: numbered steps, and a check mark at each result that was checked."""

    out: Console
    step: int = 0

    def title(self, text: str) -> None:
        """Start the next step."""
        self.step += 1
        self.out.print(f"\n{self.step}. {text}", style="bold")

    def line(self, text: str) -> None:
        """Print a line that was not checked."""
        self.out.print(f"   {printable_lines(text)}")

    def ok(self, text: str) -> None:
        """Print a result that was checked."""
        self.out.print(Text.assemble("   ", ("✓", "green"), f" {printable_lines(text)}"))

    def quote(self, text: str, indent: str = "") -> None:
        """Print a longer text with a bar at its left, and ``indent`` where a line is wrapped."""
        for line in printable_lines(text).splitlines():
            leading = line[: len(line) - len(line.lstrip())]
            for row in textwrap.wrap(line, _WIDTH, subsequent_indent=leading + indent) or [""]:
                self.out.print(f"   │ {row}", style="dim")

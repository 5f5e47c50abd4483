"""Count the lines of code of ``vllm_module/server/``: python tests/bench/code_lines.py.

A line counts if it has a part of a statement, so blank lines, comments and docstrings do not. The
files are in three groups: HTTP, how answers are parsed, and several engines behind one address.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SERVER = Path(__file__).parents[2] / "vllm_module/server"
GROUPS = {
    "parsing of answers": {"blocks", "growing_text", "parsers", "tool_formats", "tools"},
    "several engines": {"backends", "front"},
}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return the number of lines that have code."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            found -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return len(found)


def main() -> None:
    totals = dict.fromkeys(["HTTP", *GROUPS], 0)
    for path in sorted(SERVER.glob("*.py")):
        count = code_lines(path.read_text(encoding="utf-8"))
        group = next((name for name, files in GROUPS.items() if path.stem in files), "HTTP")
        totals[group] += count
        print(f"{count:5} {path.name:20} {group}")
    for group, count in totals.items():
        print(f"{count:5} {group}")


if __name__ == "__main__":
    main()

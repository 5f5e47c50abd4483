"""Small faults that can be planted in a Python file, by its syntax."""

from __future__ import annotations

import ast
from typing import NamedTuple, TypeAlias

Placed: TypeAlias = ast.expr | ast.stmt | ast.keyword  # nodes with a place in the text


class Fault(NamedTuple):
    """A piece of a file's text, from ``start`` to ``end`` in bytes, and what replaces it."""

    line: int
    start: int
    end: int
    old: str
    new: str
    kind: str


COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
EXCHANGED = {
    "min": "max", "any": "all", "startswith": "endswith", "lstrip": "rstrip", "amin": "amax",
    "removeprefix": "removesuffix", "partition": "rpartition", "popleft": "pop", "zeros": "ones",
}  # fmt: skip
EXCHANGED |= {new: old for old, new in EXCHANGED.items()}
# Arguments of these may be in any order, or only say something to people.
IN_ANY_ORDER = {"min", "max", "zip", "isinstance", "getattr", "cast"}
FOR_PEOPLE = "log", "warn", "print", "echo", "shorten", "describe"
UNTOUCHED = ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom
LEFT_ALONE = {"strict", "dtype", "device"}  # keywords that only check, or that torch demands


def faults(text: str) -> list[Fault]:
    """Return the faults of a file, none of which is in what is raised, asserted or printed."""
    found = _Finder(text)
    found.visit(ast.parse(text))
    return found.faults


def planted(text: str, fault: Fault) -> str | None:
    """Return a file's text with a fault; ``None`` if that is no Python."""
    data = text.encode()
    changed = (data[: fault.start] + fault.new.encode() + data[fault.end :]).decode()
    try:
        compile(changed, "changed", "exec")
    except (SyntaxError, ValueError):
        return None
    return changed


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.faults: list[Fault] = []
        self._text = text.encode()
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._in_function = False

    def _span(self, node: Placed) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        return self._lines[node.lineno - 1] + node.col_offset, end

    def _source(self, node: Placed) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _add(self, node: Placed, new: str, kind: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self._span(node)
        old, line = self._text[start:end].decode(), node.lineno
        if old != new:
            self.faults.append(Fault(line, start, end, old, new, kind))

    def _between(self, first: Placed, second: Placed, pair: tuple[str, str], kind: str) -> None:
        """Replace the operator between two nodes."""
        start, end = self._span(first)[1], self._span(second)[0]
        old = self._text[start:end].decode()
        if old.count(pair[0]) == 1:
            self._add(first, old.replace(*pair), kind, (start, end))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.AsyncFunctionDef):
            self.visit_FunctionDef(node)
        elif not isinstance(node, UNTOUCHED):
            super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in (*node.args.defaults, *node.args.kw_defaults):
            if each is not None:
                self.visit(each)
        outside, self._in_function = self._in_function, True
        for statement in node.body:
            self.visit(statement)
        self._in_function = outside

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._source(node.test):
            return
        if self._in_function:
            self._add(node.test, "False", "never")
            if not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
                self._add(node.test, "True", "always")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            return
        if not any(word in self._source(node.value.func).lower() for word in FOR_PEOPLE):
            if self._in_function:
                self._add(node, "None", "no call")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            pair = ("+=", "=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between(node.target, node.value, pair, "assignment")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "break", "loop")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "continue", "loop")

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, str(not value), "flag")
        elif isinstance(value, int):
            for other in {value + 1, abs(value - 1)}:
                self._add(node, str(other), "number")
        elif isinstance(value, float) and value:
            self._add(node, repr(value * 2), "number")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            pair = COMPARED[type(node.ops[0])]
            self._between(node.left, node.comparators[0], pair, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            rest = [f"({self._source(each)})" for each in node.values if each is not left_out]
            if not any(isinstance(each, ast.NamedExpr) for each in ast.walk(left_out)):
                self._add(node, f"({word.join(rest)})", "condition")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({self._source(node.operand)})", "negation")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(each, ast.JoinedStr) for each in (node.left, node.right))
        if self._in_function and not texts and type(node.op) in COMPUTED:
            self._between(node.left, node.right, COMPUTED[type(node.op)], "operator")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for each in (node.body, node.orelse):
            self._add(node, f"({self._source(each)})", "choice")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._source(node.func)
        if any(word in called.lower() for word in FOR_PEOPLE):
            return
        name = called.rpartition(".")[2]
        if name in EXCHANGED:
            self._add(node.func, called[: len(called) - len(name)] + EXCHANGED[name], "name")
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        if len(node.args) > 1 and not starred and name not in IN_ANY_ORDER:
            first, second = node.args[:2]
            between = self._text[self._span(first)[1] : self._span(second)[0]].decode()
            new = self._source(second) + between + self._source(first)
            self._add(first, new, "order", (self._span(first)[0], self._span(second)[1]))
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in LEFT_ALONE:
                self._add(keyword, "", "argument", self._with_comma(keyword))
        self.generic_visit(node)

    def _with_comma(self, node: ast.keyword) -> tuple[int, int]:
        """Return the place of an argument and the comma behind it, or before it."""
        start, end = self._span(node)
        behind = end + len(self._text[end:]) - len(self._text[end:].lstrip())
        if self._text[behind : behind + 1] == b",":
            return start, behind + 1
        before = len(self._text[:start].rstrip())
        return (before - 1 if self._text[before - 1 : before] == b"," else before), end

"""Plain variables that a script's loop carries from one step to the next: a counter, a best value.

Read from the source of the loop: what is assigned in its body, and read there before, in another
pass. What is set anew in each epoch is of that epoch, and not looked for.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

PLAIN = (bool, int, float, str)
CLOCK_MIN, MOMENT_S = 3600.0, 60.0
LOOPS = (ast.For, ast.While, ast.AsyncFor)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_OF_SCRIPTS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
Names = frozenset[str]


class Flow:
    """One pass through statements.

    Attributes:
        exposed: names that are read before they are set in it, on some way through.
        stored: names that are set.
    """

    def __init__(self, statements: Sequence[ast.AST]) -> None:
        self.exposed, self.stored, self._set = set[str](), set[str](), set[str]()
        self._all(statements)

    @property
    def carried(self) -> Names:
        return frozenset(self.exposed & self.stored)

    def _all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self._go(node)

    def _go(self, node: ast.AST) -> None:
        step: Callable[[Any], None] = getattr(self, f"_{type(node).__name__}", self._in_order)
        step(node)

    def _in_order(self, node: ast.AST) -> None:
        self._all(list(ast.iter_child_nodes(node)))

    def _either(self, *branches: Sequence[ast.AST]) -> None:
        before, ends = self._set, []
        for branch in branches:
            self._set = set(before)
            self._all(branch)
            ends.append(self._set)
        self._set = set.intersection(*ends)

    def _touch(self, name: str, context: ast.expr_context) -> None:
        if isinstance(context, ast.Store):
            self._set.add(name)
            self.stored.add(name)
        elif name not in self._set:
            self.exposed.add(name)

    def _Name(self, node: ast.Name) -> None:
        self._touch(node.id, node.ctx)

    def _Attribute(self, node: ast.Attribute) -> None:
        self._go(node.value)
        if isinstance(node.value, ast.Name):
            self._touch(f"{node.value.id}.{node.attr}", node.ctx)

    def _Assign(self, node: ast.Assign) -> None:
        self._all([node.value, *node.targets])

    def _AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, (ast.Name, ast.Attribute)):
            self._go(_as_read(node.target))
        self._all([node.value, node.target])

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._all([node.value, node.target])

    def _NamedExpr(self, node: ast.NamedExpr) -> None:
        self._all([node.value, node.target])

    def _If(self, node: ast.If) -> None:
        self._go(node.test)
        self._either(node.body, node.orelse)

    def _For(self, node: ast.For) -> None:
        self._go(node.iter)
        self._either([node.target, *node.body], node.orelse)

    def _While(self, node: ast.While) -> None:
        self._go(node.test)
        self._either(node.body, node.orelse)

    def _Try(self, node: ast.Try) -> None:
        self._either([*node.body, *node.orelse], *(h.body for h in node.handlers), [])
        self._all(node.finalbody)

    def _FunctionDef(self, node: ast.FunctionDef) -> None:
        """As if it were called where it stands: a step's function is."""
        inner = Flow(node.body)
        own = inner.stored - _declared(node)
        own |= {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        for name in inner.exposed - own:
            self._touch(name, ast.Load())
        for name in inner.stored - own:
            self._touch(name, ast.Store())

    def _ListComp(self, node: Any) -> None:
        """Its targets are its own."""
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        parts = [part for g in node.generators for part in (g.iter, g.target, *g.ifs)]
        inner = Flow([*parts, *made])
        for name in inner.exposed - inner.stored:
            self._touch(name, ast.Load())

    _SetComp = _GeneratorExp = _DictComp = _ListComp

    def _Lambda(self, node: ast.Lambda) -> None:
        """Its names are read when it is called."""


def _as_read(target: ast.Name | ast.Attribute) -> ast.AST:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    return ast.Attribute(target.value, target.attr, ast.Load())


def _declared(function: ast.AST) -> set[str]:
    """Names that are not its own, though it sets them. Attributes are nobody's own."""
    outside = [s for s in ast.walk(function) if isinstance(s, (ast.Nonlocal, ast.Global))]
    said = {name for statement in outside for name in statement.names}
    stored = (a for a in ast.walk(function) if isinstance(a, ast.Attribute))
    return said | {f"{a.value.id}.{a.attr}" for a in stored if isinstance(a.value, ast.Name)}


@functools.lru_cache(maxsize=64)
def _tree(filename: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None


def _first_line(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _scope(code: CodeType) -> ast.AST | None:
    """What the code was made of."""
    tree = _tree(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        is_named = isinstance(node, FUNCTIONS) and node.name == code.co_name
        if is_named and _first_line(node) == code.co_firstlineno:
            return node
    return None


def _loop_at(node: ast.AST, line: int) -> ast.AST | None:
    """The outermost loop that has the line, or function whose decorator has it."""
    for child in ast.iter_child_nodes(node):
        if not getattr(child, "lineno", 0):
            continue
        if _first_line(child) <= line <= (child.end_lineno or 0):  # type: ignore[attr-defined]
            return child if isinstance(child, (*LOOPS, *FUNCTIONS)) else _loop_at(child, line)
    return None


@functools.lru_cache(maxsize=256)
def carried_by_loop(code: CodeType, line: int) -> tuple[Names, range]:
    """Of the outermost loop in ``code`` that is at ``line``; and the loop's lines."""
    scope = _scope(code)
    loop: Any = None if scope is None else _loop_at(scope, line)
    if loop is None:
        return frozenset(), range(0)
    lines = range(_first_line(loop), (loop.end_lineno or 0) + 1)
    if isinstance(loop, FUNCTIONS):
        return Flow([loop]).carried, lines
    target = Flow([loop.target]).stored if isinstance(loop, ast.For) else set[str]()
    test = [loop.test] if isinstance(loop, ast.While) else []
    return Flow([*test, *loop.body]).carried - target, lines


@functools.lru_cache(maxsize=256)
def carried_by_function(code: CodeType) -> Names:
    """Of a step's function, that stands in no loop: what it sets outside itself."""
    scope = _scope(code)
    return Flow([scope]).carried if isinstance(scope, FUNCTIONS) else frozenset()


def is_of_script(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    is_ours = name.partition(".")[0] == "elastic_ft"
    return not is_ours and not frame.f_code.co_filename.startswith(("<", *NOT_OF_SCRIPTS))


def _is_clock(value: Any) -> bool:
    """Whether it is the time of day, or one of this machine, of a moment ago: each has its own."""
    clocks = (time.time, time.perf_counter, time.monotonic)
    return (
        type(value) is float
        and value > CLOCK_MIN
        and any(abs(value - clock()) < MOMENT_S for clock in clocks)
    )


def plain_values(known: Mapping[str, Any], names: Names) -> Iterator[tuple[str, Any, Any]]:
    """Of those, what numbers and text are now, and whose attribute each is, if one's."""
    for name in sorted(names):
        base, _, attribute = name.partition(".")
        value = owner = known.get(base)
        if attribute:
            value = getattr(owner, "__dict__", {}).get(attribute)
        if type(value) in PLAIN and not _is_clock(value):
            yield name, value, owner if attribute else None


def carried_here(
    frames: Iterable[FrameType], functions: Iterable[tuple[CodeType, Mapping[str, Any]]]
) -> Iterator[tuple[str, Any, Any]]:
    """Of the loops that run in ``frames``, and of steps' functions, with the names that these
    see, which stand elsewhere: see ``plain_values``."""
    within = list[tuple[str, range]]()
    for frame in filter(is_of_script, frames):
        names, lines = carried_by_loop(frame.f_code, frame.f_lineno)
        within.append((frame.f_code.co_filename, lines))
        yield from plain_values({**frame.f_globals, **frame.f_locals}, names)
    for code, known in functions:
        if not any(code.co_filename == f and code.co_firstlineno in r for f, r in within):
            yield from plain_values(known, carried_by_function(code))

"""Which arrays a kernel reads and writes, from its source alone.

def scale(x_N, y_N, factor):
    i = cuda.grid(1)
    y_N[i] = factor * x_N[i]          ->  Accesses(reads=(0,), writes=(1,))
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from numstack.simt.source import Source, constant_object, cuda_name, device_calls, plain_function, source_of


@dataclass(frozen=True)
class Accesses:
    """Indices of array parameters that a kernel loads from and stores to (an atomic does both)."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def accesses(py_func: Callable[..., Any]) -> Accesses:
    """Which parameters are arrays that the kernel reads, and which it writes; cached, compiles nothing.

    Device functions are followed. Functions that numba knows by other means (``@overload``) take scalars, or say what
    they do to arrays in an attribute ``accesses``.
    """
    return _accesses(plain_function(py_func))


@functools.lru_cache(maxsize=1024)
def _accesses(function: FunctionType) -> Accesses:
    reads, writes = _of_function(source_of(function), (), {})
    return Accesses(tuple(sorted(reads)), tuple(sorted(writes)))


Found = tuple[set[int], set[int]]


def _of_function(source: Source, callers: tuple[FunctionType, ...], known: dict[FunctionType, Found]) -> Found:
    """What a function reads and writes; ``known`` has what was found of device functions, so that each is read once."""
    found = known.get(source.function)
    if found is None:
        finder = _Finder(source, (*callers, source.function), known)
        for _ in range(2):  # the second time with every alias known
            for statement in source.tree.body:
                finder.visit(statement)
        found = known[source.function] = finder.reads, finder.writes
    return found


class _Finder(ast.NodeVisitor):
    def __init__(self, source: Source, callers: tuple[FunctionType, ...], known: dict[FunctionType, Found]) -> None:
        self.namespace = source.namespace
        self.callers = callers
        self.known = known
        self.calls = {id(call): callee for call, callee in device_calls(source)}
        #: A name, and the parameters that it may be or be a view of.
        self.views = {name: {index} for index, name in enumerate(source.parameters)}
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def roots(self, node: ast.AST) -> set[int]:
        """Parameters that an expression may be a view of: ``x``, ``x[row]``, ``x.T``, ``a if c else b``."""
        if isinstance(node, ast.Name):
            return self.views.get(node.id, set())
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self.roots(node.value)
        if isinstance(node, ast.Attribute):
            return self.roots(node.value) if node.attr in ("T", "flat") else set()
        if isinstance(node, ast.IfExp):
            return self.roots(node.body) | self.roots(node.orelse)
        if isinstance(node, ast.Tuple):
            return set().union(*(self.roots(element) for element in node.elts)) if node.elts else set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.roots(node.func.value)  # x.reshape(...), x.view(...)
        return set()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.store(target)
            if isinstance(target, ast.Name) and (roots := self.roots(node.value)):
                self.views[target.id] = self.views.get(target.id, set()) | roots

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.store(node.target)
        if isinstance(node.target, ast.Subscript):
            self.reads |= self.roots(node.target.value)

    def store(self, target: ast.AST) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self.store(element)
        elif isinstance(target, ast.Subscript):
            self.writes |= self.roots(target.value)
            self.visit(target.slice)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.reads |= self.roots(node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.reads |= self.roots(node.iter)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = cuda_name(node.func, self.namespace)
        callee = self.calls.get(id(node))
        if name is not None:
            if name.startswith("atomic."):
                self.reads |= self.roots(node.args[0])
                self.writes |= self.roots(node.args[0])
        elif isinstance(known := getattr(constant_object(node.func, self.namespace), "accesses", None), Accesses):
            for index, argument in enumerate(node.args):
                self.reads |= self.roots(argument) if index in known.reads else set()
                self.writes |= self.roots(argument) if index in known.writes else set()
        elif callee is not None and callee.function not in self.callers:
            reads, writes = _of_function(callee, self.callers, self.known)
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            for index, parameter in enumerate(callee.parameters):
                value = node.args[index] if index < len(node.args) else named.get(parameter)
                if value is not None:
                    roots = self.roots(value)
                    self.reads |= roots if index in reads else set()
                    self.writes |= roots if index in writes else set()
        self.generic_visit(node)

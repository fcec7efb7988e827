"""What the compiler knows about a function: its syntax tree with true line numbers, and what its names stand for."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from numba import cuda
from numba.core.registry import cpu_target

from numstack.errors import KernelError

#: Objects of numba.cuda that may have been imported by name: ``from numba.cuda import syncthreads``.
_CUDA_OBJECTS = {
    id(getattr(cuda, name)): name
    for name in dir(cuda)
    if not name.startswith("_")
    and not isinstance(getattr(cuda, name), (ModuleType, int, str))
    and type(getattr(cuda, name)).__module__ != "numba.core.types.scalars"
    and getattr(getattr(cuda, name), "__module__", "").startswith("numba.cuda")
}


@dataclass(frozen=True, eq=False)
class Source:
    """A function's source.

    Attributes
    ----------
    function : function
        The plain Python function.
    file : str
        Where it was written.
    tree : ast.FunctionDef
        Without decorators and docstring; every node has its true line number and a ``file``. Copy before changing it.
    """

    function: FunctionType
    file: str
    tree: ast.FunctionDef

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def parameters(self) -> list[str]:
        return [argument.arg for argument in self.tree.args.args]

    @property
    def namespace(self) -> Mapping[str, Any]:
        """Closure variables, globals and builtins as they are now."""
        function = self.function
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
        builtins = function.__globals__.get("__builtins__", {})
        if isinstance(builtins, ModuleType):
            builtins = vars(builtins)
        return ChainMap(closure, function.__globals__, builtins)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading it is the test
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=1024)
def source_of(function: FunctionType) -> Source:
    """Parse a function.

    Raises
    ------
    KernelError
        If its source cannot be found, or is not a plain ``def``.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise KernelError(
            f"{function.__qualname__}: its source cannot be found; define it in a file or a notebook cell, not by exec"
        ) from None
    file = inspect.getsourcefile(function) or "<unknown>"
    first = max(first, 1)
    try:
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except SyntaxError:
        tree = ast.Pass()
    if not isinstance(tree, ast.FunctionDef):
        raise KernelError(f"{file}:{first}: {function.__qualname__} must be a plain function (def)")
    ast.increment_lineno(tree, first - 1)
    tree.name = function.__name__
    tree.decorator_list = []
    tree.returns = None
    for argument in tree.args.args:
        argument.annotation = None
    arguments = tree.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise KernelError(f"{file}:{first}: {function.__qualname__} must take plain positional parameters")
    if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant):
        tree.body = tree.body[1:] or [ast.copy_location(ast.Pass(), tree.body[0])]
    for node in ast.walk(tree):
        node.file = file  # type: ignore[attr-defined]  # nodes of several files meet when functions are inlined
    return Source(function, file, tree)


def error_at(node: ast.AST, problem: str, advice: str) -> KernelError:
    """``file:line: problem; advice`` and the source line itself, ready to raise."""
    file = getattr(node, "file", "<unknown>")
    line = getattr(node, "lineno", 0)
    text = linecache.getline(file, line).strip()
    return KernelError(f"{file}:{line}: {problem}; {advice}" + (f"\n    {text}" if text else ""))


def dotted(node: ast.AST) -> tuple[str, ...] | None:
    """The parts of ``a.b.c``, or None if the expression is anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return (node.id, *reversed(parts))


_MISSING = object()


def constant_object(node: ast.AST, namespace: Mapping[str, Any]) -> Any:
    """What a name, or attributes of a module or class, stand for; None if that isn't known before the kernel runs."""
    parts = dotted(node)
    if parts is None:
        return None
    value = namespace.get(parts[0], _MISSING)
    for part in parts[1:]:
        if not isinstance(value, (ModuleType, type)):
            return None
        value = getattr(value, part, _MISSING)
    return None if value is _MISSING else value


def cuda_name(node: ast.AST, namespace: Mapping[str, Any]) -> str | None:
    """``"threadIdx.x"`` for ``cuda.threadIdx.x`` however numba.cuda was imported; None for anything else."""
    parts = dotted(node)
    if parts is None:
        return None
    root = namespace.get(parts[0], _MISSING)
    rest = parts[1:]
    while isinstance(root, ModuleType) and root is not cuda and rest:
        root, rest = getattr(root, rest[0], _MISSING), rest[1:]
    if root is cuda:
        if not rest or (isinstance(getattr(cuda, rest[0], None), ModuleType) and rest[0] != "libdevice"):
            return None
        known = getattr(cuda, rest[0], None)
        return ".".join(rest) if known is None or id(known) in _CUDA_OBJECTS or rest[0] == "libdevice" else None
    name = _CUDA_OBJECTS.get(id(root))
    return ".".join((name, *rest)) if name else None


def device_function(value: Any) -> FunctionType | None:
    """The Python function behind a device function; None for anything that numba's CPU target calls as it is."""
    function = getattr(value, "py_func", None)
    if isinstance(function, FunctionType):
        return function
    if isinstance(value, FunctionType) and not _known_to_numba(value):
        return value
    return None


def is_collective(value: Any) -> bool:
    """Whether a value is a function of whole warps (see `collective`)."""
    return hasattr(value, "collective_writes")


def refuse_gpu_only(call: ast.Call, function: Any) -> None:
    """Raise KernelError if a call is of an instruction that a CPU does not have."""
    if getattr(function, "is_gpu_only", False):
        raise error_at(call, f"{function.__name__} runs on a GPU only", "choose another variant on a CPU")


def _known_to_numba(function: FunctionType) -> bool:
    context = cpu_target.typing_context
    context.refresh()
    return context._lookup_global(function) is not None


def device_calls(source: Source) -> Iterator[tuple[ast.Call, Source]]:
    """Each call of a device function in ``source``, and that function's source."""
    namespace = source.namespace
    stored = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            if isinstance(node.func, ast.Name) and node.func.id in stored:
                continue
            if cuda_name(node.func, namespace) is not None:
                continue
            function = device_function(constant_object(node.func, namespace))
            if function is not None:
                yield node, source_of(function)


def plain_function(kernel: Callable[..., Any]) -> FunctionType:
    """The Python function of a kernel, a dispatcher or a plain function."""
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        raise KernelError(f"a kernel must be a Python function, not {type(kernel).__name__}")
    return function

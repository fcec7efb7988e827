"""What a compiled kernel depends on, as one hash: its source, and all that its source refers to."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from numstack.simt.source import Source, constant_object, cuda_name, device_function, dotted, plain_function, source_of


def source_digest(py_func: Callable[..., Any]) -> str:
    """SHA-256 over the source of a kernel, of every device function that it reaches, and of every constant it uses.

    Line numbers, comments, signature and versions are not part of it.
    """
    function = plain_function(py_func)
    digest = hashlib.sha256()
    for part in _parts(source_of(function), set()):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def functions_reached(py_func: Callable[..., Any]) -> set[FunctionType]:
    """The Python functions that a kernel refers to, and those that they refer to.

    PTX instructions are among them, but not what only their CPU twins call.
    """
    found: set[FunctionType] = set()
    waiting = [plain_function(py_func)]
    while waiting:
        source = source_of(waiting.pop())
        for node in _references(source):
            value = constant_object(node, source.namespace) if cuda_name(node, source.namespace) is None else None
            callee = device_function(value) if callable(value) else None
            reached = {f for f in (callee, value) if isinstance(f, FunctionType)}
            if callee is not None and callee not in found and not any(hasattr(f, "assembly") for f in reached):
                waiting.append(callee)
            found |= reached
    return found


def _parts(source: Source, seen: set[FunctionType]) -> Iterator[str]:
    if source.function in seen:
        return
    seen.add(source.function)
    yield _dump(source)
    yield repr(source.function.__defaults__)
    yield getattr(source.function, "assembly", "")  # of a PTX instruction, whose body says nothing about it
    namespace = source.namespace
    for node in _references(source):
        text = ".".join(dotted(node) or ())
        if cuda_name(node, namespace) is not None:
            yield f"{text}=cuda"
            continue
        value = constant_object(node, namespace)
        callee = device_function(value) if callable(value) else None
        if callee is not None:
            yield f"{text}=device {callee.__qualname__}"
            yield from _parts(source_of(callee), seen)
        elif isinstance(value, FunctionType):
            yield f"{text}={value.__module__}.{value.__qualname__} {_file_digest(inspect.getsourcefile(value))}"
            yield getattr(value, "assembly", "")
        elif isinstance(value, np.ndarray):
            yield f"{text}={value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        elif not isinstance(value, ModuleType) and value is not None:
            yield f"{text}={value!r}"


@functools.lru_cache(maxsize=1024)
def _dump(source: Source) -> str:
    return ast.dump(source.tree)


@functools.lru_cache(maxsize=1024)
def _references(source: Source) -> tuple[ast.expr, ...]:
    """Names and dotted names that are not the function's own variables, each once."""
    own = set(source.parameters)
    own |= {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found: dict[tuple[str, ...], ast.expr] = {}
    inner = {id(n.value) for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            parts = dotted(node)
            if parts is not None and parts[0] not in own:
                found.setdefault(parts, node)
    return tuple(found.values())


@functools.lru_cache(maxsize=256)
def _file_digest(file: str | None) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""

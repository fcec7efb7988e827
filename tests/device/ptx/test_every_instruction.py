"""Each function that numstack.device.ptx offers to kernels is used in a test of this folder."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import numstack.device.ptx

# What makes instructions, and what they are made of: tested through them, and in test_assembly.py.
NOT_INSTRUCTIONS = {"assembly"}


def instructions() -> dict[str, set[str]]:
    """Public functions of each module, instructions and what makes them alike."""
    found: dict[str, set[str]] = {}
    for module in pkgutil.iter_modules(numstack.device.ptx.__path__):
        if module.name in NOT_INSTRUCTIONS:
            continue
        loaded = importlib.import_module(f"numstack.device.ptx.{module.name}")
        found[module.name] = {
            name
            for name, value in vars(loaded).items()
            if callable(value) and not name.startswith("_") and _home(value) == loaded.__name__
        }
    return found


def _home(value: object) -> str:
    return str(getattr(getattr(value, "py_func", value), "__module__", ""))


def used() -> set[str]:
    """Names, attributes and strings in the tests of this folder: ``tma.load_2d`` as both its parts together."""
    names: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                names |= {f"{of}.{node.attr}"}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module.rpartition('.')[2]}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
    return names


def test_each_is_used_in_a_test() -> None:
    found = instructions()
    assert {"tma", "wgmma", "mbarrier", "mma", "vectors"} <= set(found)
    names = used()
    untested = [
        f"{module}.{name}"
        for module, functions in found.items()
        for name in sorted(functions)
        if not {f"{module}.{name}", f"ptx.{name}", name} & names
    ]
    assert not untested, f"numstack.device.ptx has functions without a test in tests/device/ptx: {', '.join(untested)}"

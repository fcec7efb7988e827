"""Which kernels ran on a GPU since they last changed.

A run of ``tests/kernels`` on a GPU writes ``tests/gpu_records.json``: for each kernel file a hash of its source, the
card, and how its tests ended. Every other run says at its end which kernel files have changed since.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

RECORDS = Path(__file__).with_name("gpu_records.json")
ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "numstack" / "kernels"
PTX = ROOT / "numstack" / "device" / "ptx"
TESTS = ROOT / "tests" / "kernels"
NOT_OPERATIONS = {"build", "catalogue", "launch", "variants"}  # which may have a test, as they have


def operations() -> list[str]:
    """Names of the kernel files that have a test of their own; the others are what they are made of."""
    names = {path.stem for path in KERNELS.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(name for name in names - NOT_OPERATIONS if (TESTS / f"test_{name}.py").exists())


def operation_of(test_file: str) -> str | None:
    """The operation that ``test_gemm_tensor_cores`` is about: gemm; None if it is about none."""
    stem = test_file.removeprefix("test_")
    fitting = [name for name in operations() if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


@functools.cache
def digest(name: str) -> str:
    """Hash of what a kernel file compiles to: its code, and that of kernel files and PTX instructions that it imports,
    without comments."""
    parts = [_code(ROOT / "numstack" / "device" / "conversions.py")]
    modules = _reachable(name)
    for module in sorted(modules):
        parts += [f"{module}: {_code(path)}" for path in _files(module)]
    instructions = _closed({found for module in modules for path in _files(module) for found in _instructions(path)})
    parts += [f"{path.name}: {_code(path)}" for path in sorted(instructions)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _files(module: str) -> list[Path]:
    folder = KERNELS / module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _reachable(name: str) -> set[str]:
    found, waiting = {name}, [name]
    while waiting:
        for path in _files(waiting.pop()):
            for node in ast.walk(ast.parse(path.read_text())):
                for module in _imported(node):
                    if module not in found and any(file.exists() for file in _files(module)):
                        found.add(module)
                        waiting.append(module)
    return found


def _imported(node: ast.AST) -> list[str]:
    """Names of kernel files that an import statement mentions."""
    if not isinstance(node, ast.ImportFrom) or not node.module or not node.module.startswith("numstack.kernels"):
        return []
    inside = node.module.removeprefix("numstack.kernels").lstrip(".")
    return [inside.split(".")[0]] if inside else [alias.name for alias in node.names]


def _instructions(path: Path) -> set[Path]:
    """Files of PTX instructions that a file imports, by name or as attributes of the package."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "numstack.device.ptx":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("numstack.device.ptx."):
            names.add(node.module.rpartition(".")[2])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ptx":
            names.add(node.attr)
    homes = _homes()
    return {file for name in names if (file := PTX / f"{homes.get(name, name)}.py").exists()}


def _closed(files: set[Path]) -> set[Path]:
    """These, and those that they build on."""
    found, waiting = set(files), list(files)
    while waiting:
        new = _instructions(waiting.pop()) - found
        found |= new
        waiting += new
    return found


@functools.cache
def _homes() -> dict[str, str]:
    """For each instruction that the package of instructions hands on, the file that has it."""
    package = PTX / "__init__.py"
    nodes = ast.walk(ast.parse(package.read_text())) if package.exists() else ()
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module).rpartition(".")[2] for node in imports for alias in node.names}


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body.pop(0)  # a docstring
    return _structure(tree)


def _structure(node: Any) -> str:
    """As ``ast.dump``, but the same in every version of Python: what is empty is left out."""
    if isinstance(node, ast.AST):
        fields = [f"{name}={_structure(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_structure, node))}]"
    return repr(node)


def changed() -> list[str]:
    """Kernel files that have not passed on a GPU as they are now."""
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    good = {name for name, record in records.items() if record["digest"] == digest(name) and not record["failed"]}
    return [name for name in operations() if name not in good]


class Plugin:
    """Counts the results of each kernel file's tests."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.nodeid.split("::")[0])
        if path.parent.name != "kernels" or not (report.when == "call" or report.failed):
            return
        operation = operation_of(path.stem)
        if operation is not None:
            counts = self.results.setdefault(operation, {"passed": 0, "failed": 0, "skipped": 0})
            counts[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not self.results:
            return
        from numstack.device import current_device

        device = current_device()
        if device.kind != "cuda":
            return
        records: dict[str, Any] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        for name in self.results:
            records[name] = {"digest": digest(name), "card": device.name, **self.results[name]}
        RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stale = changed()
        if stale:
            terminalreporter.write_line(f"kernels changed since they last passed on a GPU: {', '.join(stale)}")
        else:
            terminalreporter.write_line("every kernel has passed on a GPU as it is now")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(), "gpu-records")

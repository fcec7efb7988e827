"""The cache of compiled GPU kernels: what its key covers, and that nothing damages it. Needs no GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from numba import cuda, types

from numstack.device.cuda import cache, compiler
from numstack.device.cuda.compiler import Architecture, Cubin, compile_cubin

SM_90A = Architecture.parse("sm_90a")
F32 = types.Array(types.float32, 1, "C")
FACTOR = 2


@cuda.jit(device=True)
def scaled(x):
    return x * FACTOR


def _scale(x_N):
    x_N[cuda.grid(1)] = scaled(x_N[cuda.grid(1)])


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What had to be compiled, one entry a compilation."""
    seen: list[Any] = []

    def counting(*arguments: Any) -> Cubin:
        seen.append(arguments)
        return compile_cubin(*arguments)

    monkeypatch.setattr(cache, "compile_cubin", counting)
    return seen


def test_the_second_time_nothing_is_compiled(compiled: list[Any]) -> None:
    first = cache.cubin(_scale, (F32,), 64, SM_90A)
    second = cache.cubin(_scale, (F32,), 64, SM_90A)
    assert len(compiled) == 1
    assert first == second and first.code.startswith(b"\x7fELF") and first.resources.registers > 0


def test_the_linker_finds_nothing_in_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a driver it would, and the assembler, which has nothing to do then, reports no registers."""
    options: list[list[str]] = []
    create = compiler.nvjitlink.create

    def noting(n_options: int, given: list[str]) -> Any:
        options.append(given)
        return create(n_options, given)

    monkeypatch.setattr(compiler.nvjitlink, "create", noting)
    compile_cubin(_scale, (F32,), 64, SM_90A)
    assert all("-no-cache" in given for given in options) and len(options) == 1


def test_everything_that_code_depends_on_is_in_the_key(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cubin(_scale, (F32,), 64, SM_90A)
    cache.cubin(_scale, (types.Array(types.float64, 1, "C"),), 64, SM_90A)
    cache.cubin(_scale, (F32,), 128, SM_90A)
    cache.cubin(_scale, (F32,), 64, Architecture.parse("sm_80"))
    monkeypatch.setattr(cache, "_tools", lambda: "numba 99")
    cache.cubin(_scale, (F32,), 64, SM_90A)
    assert len(compiled) == 5


def test_a_damaged_file_is_compiled_again(compiled: list[Any], fresh: Path) -> None:
    good = cache.cubin(_scale, (F32,), 64, SM_90A)
    (path,) = fresh.rglob("*.cubin")
    for damage in (b"", b"not json\n", b'{"registers": 1}\nELF', path.read_bytes()[:40], path.read_bytes()[:-1]):
        path.write_bytes(damage)
        again = cache.cubin(_scale, (F32,), 64, SM_90A)
        assert again.resources == good.resources and len(again.code) == len(good.code)
        assert Cubin.from_bytes(path.read_bytes()) == again
    assert len(compiled) == 6


def test_a_change_in_a_device_function_or_a_constant_compiles_again(fresh: Path) -> None:
    program = fresh / "program.py"
    text = textwrap.dedent("""
        from numba import cuda, types
        from numstack.device.cuda import cache
        from numstack.device.cuda.compiler import Architecture
        FACTOR = 2

        @cuda.jit(device=True)
        def scaled(x):
            return x * FACTOR

        def _scale(x_N):
            x_N[cuda.grid(1)] = scaled(x_N[cuda.grid(1)])

        cache.cubin(_scale, (types.Array(types.float32, 1, "C"),), 64, Architecture.parse("sm_90a"))
    """)
    counts = []
    for version in (text, text, text.replace("= 2", "= 3"), text.replace("x * F", "x + F")):
        program.write_text(version)
        subprocess.run([sys.executable, str(program)], check=True, timeout=120)
        counts.append(len(list(fresh.rglob("*.cubin"))))
    assert counts == [1, 1, 2, 3]


def test_two_processes_that_compile_at_once_leave_one_whole_file(fresh: Path) -> None:
    program = fresh / "program.py"
    program.write_text(
        "from tests.device.test_cubin_cache import F32, SM_90A, _scale\n"
        "from numstack.device.cuda import cache\n"
        "cache.cubin(_scale, (F32,), 64, SM_90A)\n"
    )
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {str(root)!r}); exec(open({str(program)!r}).read())",
            ]
        )
        for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    files = [path for path in fresh.rglob("*") if path.is_file() and path != program]
    assert len(files) == 1 and files[0].suffix == ".cubin"
    assert Cubin.from_bytes(files[0].read_bytes()).code.startswith(b"\x7fELF")

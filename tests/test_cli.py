"""The command ``numstack``: what it prints, its exit codes, and that it imports no more than it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from numstack import cli, launch
from numstack.data import TokenFile
from numstack.errors import CommError, ConfigError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in cli.SUBCOMMANDS)


@pytest.mark.parametrize("name", list(cli.SUBCOMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: numstack {name}" in capsys.readouterr().out


def test_no_or_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "there is no command 'trian'; the commands are train, " in capsys.readouterr().err


def test_help_imports_neither_numba_nor_mpi() -> None:
    code = (
        "import sys; from numstack import cli; cli.main(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('numba', 'mpi4py', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_prepare_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    out = tmp_path / "out"
    assert (
        cli.main(["data", "prepare", str(tmp_path / "text.txt"), "--out", str(out), "--validation-share", "0.2"]) == 0
    )
    prepared = capsys.readouterr().out
    assert f"train with: --data {out}" in prepared
    assert TokenFile(out / "train.bin").n_tokens == 760
    assert cli.main(["data", "info", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == prepared.splitlines()[:-1]
    assert cli.main(["data", "info", str(out / "train.bin")]) == 0
    assert "train.bin: 760 tokens, largest id 6" in capsys.readouterr().out


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "info", str(tmp_path / "none.bin")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("numstack data: ") and "there is no such file" in error
    assert error.count("\n") == 1


def test_train_checks_before_it_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: there is no such program"):
        launch.main([str(tmp_path / "none.py")])
    (tmp_path / "program.py").write_text("")
    with pytest.raises(ConfigError, match="-n 0: give at least one rank"):
        launch.main(["-n", "0", str(tmp_path / "program.py")])
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(CommError, match="there is no mpirun; install one"):
        launch.main([str(tmp_path / "program.py")])


def test_train_passes_options_and_exit_codes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys; print(os.environ['OMPI_COMM_WORLD_RANK'], *sys.argv[1:]); sys.exit(int(sys.argv[2]))"
    )
    assert launch.main(["-n", "2", str(tmp_path / "program.py"), "--code", "0", "-n", "7"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 --code 0 -n 7", "1 --code 0 -n 7"]
    assert launch.main([str(tmp_path / "program.py"), "--code", "3"]) == 3

"""Programs that come with the sources: they are found there or in the current directory, or the error gives advice."""

from pathlib import Path

import pytest

from shardnet.cli import programs
from shardnet.cli.main import main


def test_the_checkout_comes_first() -> None:
    assert programs.find("workers/train_lm.py") == Path(__file__).parents[2] / "workers" / "train_lm.py"


def test_an_installed_package_takes_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").touch()
    monkeypatch.chdir(tmp_path)
    assert programs.find("program.py") == tmp_path / "program.py"


def test_a_program_that_is_nowhere_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "CHECKOUT", tmp_path / "site-packages")
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardnet demo: workers/train_lm.py is neither beside the package")
    assert err.count("\n") == 1

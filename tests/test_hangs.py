"""A test that hangs where pytest-timeout cannot reach it must not hang the whole run: each sample runs in a fresh pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SAID = "Timeout (0:00:0"  # by Python's faulthandler

HEAD = """
import ctypes, os, threading, time
import pytest
from tests import hangs

hangs.LATER_S = 0.5
"""

SAMPLES = {
    "its fixture's end, after it has failed": """
@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_it(stuck):
    os.close(os.open("begun", os.O_CREAT))
    assert False
""",
    "C, where no signal is heard": """
def test_it():
    os.close(os.open("begun", os.O_CREAT))
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
""",
}


def pytest_of(folder: Path, sample: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(HEAD + sample)
    arguments = ["-p", "tests.hangs", "-p", "no:cacheprovider", "-q", "--timeout", "0.5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "pytest", *arguments, str(folder)]
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_the_process_of_a_test_that_hangs_in(tmp_path: Path, sample: str) -> None:
    ended = pytest_of(tmp_path, sample)
    assert (tmp_path / "begun").exists()
    assert ended.returncode == 1
    assert SAID in ended.stderr
    assert 'test_sample.py", line ' in ended.stderr
    assert "1 failed" not in ended.stdout


def test_who_fails_and_comes_to_an_end_is_left_alone(tmp_path: Path) -> None:
    ended = pytest_of(tmp_path, "def test_it():\n    assert False\n\ndef test_another():\n    time.sleep(0.6)\n")
    assert ended.returncode == 1
    assert SAID not in ended.stderr
    assert "2 failed" in ended.stdout

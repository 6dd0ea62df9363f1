"""The programs of docs/frameworks.md, as they stand there. Those for torchrun run on forked ranks, in the environment that torchrun would
give them; torchrun itself starts the program in tests/interop/test_docs.py."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.interop.sessions import run
from tests.training.programs import run_program, run_under_torchrun
from tests.training.workers import Nursery

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


def program(heading: str) -> str:
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    found = re.search(r"^```python\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def write(package: str, text: str, folder: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'shardnet[frameworks]'")
    (folder / "train.py").write_text(text)


def output(package: str, text: str, folder: Path, within_s: float) -> str:
    write(package, text, folder)
    ended = run([sys.executable, "train.py"], folder, within_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.timeout(120)
def test_accelerate(nursery: Nursery, tmp_path: Path) -> None:
    write("accelerate", program("Hugging Face accelerate"), tmp_path)
    check_accelerate(run_under_torchrun(nursery, tmp_path, 2, "train.py", within_s=110.0))


@pytest.mark.timeout(120)
def test_accelerate_under_shardnet_run(nursery: Nursery, tmp_path: Path) -> None:
    plain, told = '("shardnet")', '("shardnet", init_method="shardnet://")'
    write("accelerate", program("Hugging Face accelerate").replace(plain, told), tmp_path)
    check_accelerate(run_program(nursery, tmp_path, "run", "--nproc", "2", "train.py", within_s=110.0))


def check_accelerate(said: str) -> None:
    losses = [float(each) for each in re.findall(r"epoch \d: ([\d.]+)", said)]
    assert len(losses) == 3, "one process prints, not each"
    assert losses[2] < losses[0] / 4


@pytest.mark.timeout(120)
def test_trainer(nursery: Nursery, tmp_path: Path) -> None:
    write("transformers", program("Hugging Face transformers: Trainer"), tmp_path)
    text = run_under_torchrun(nursery, tmp_path, 2, "train.py", within_s=110.0)
    losses = [float(each) for each in re.findall(r"^losses (.*)$", text, re.MULTILINE)[0].split()]
    assert len(losses) == 3, "128 sequences in batches of 8 on two ranks are 8 steps an epoch"
    assert losses[2] < losses[0]


@pytest.mark.conformance  # once, beside other tests, it did not end; the cause is unknown, and it was not seen again in 24 runs
@pytest.mark.timeout(180)
def test_lightning(tmp_path: Path) -> None:
    text = output("lightning", program("PyTorch Lightning"), tmp_path, within_s=160.0)
    assert re.search(r"shardnet: loss [\d.]+", text)


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_ray(tmp_path: Path) -> None:
    text = output("ray", program("Ray Train"), tmp_path, within_s=390.0)
    found = re.findall(r"rank (\d) of 2 by shardnet: ([\d.]+) to ([\d.]+)", text)
    assert sorted({rank for rank, _, _ in found}) == ["0", "1"], text
    assert all(float(last) < float(first) for _, first, last in found)

"""The programs of docs/frameworks.md, as they stand there, started as it says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.interop.sessions import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def program(heading: str) -> str:
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    found = re.search(r"^```python\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def output(package: str, text: str, launcher: list[str], folder: Path, within_s: float = 110.0) -> str:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'shardnet[frameworks]'")
    (folder / "train.py").write_text(text)
    ended = run([sys.executable, *launcher, "train.py"], folder, within_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "shardnet"])
def test_accelerate(tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text, command = program("Hugging Face accelerate"), TORCHRUN
    if launcher == "shardnet":
        text, command = (
            text.replace('("shardnet")', '("shardnet", init_method="shardnet://")'),
            ["-m", "shardnet.cli", "run", "--nproc", "2"],
        )
    said = output("accelerate", text, command, tmp_path)
    losses = [float(each) for each in re.findall(r"epoch \d: ([\d.]+)", said)]
    assert len(losses) == 3, "one process prints, not each"
    assert losses[2] < losses[0] / 4


@pytest.mark.timeout(120)
def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = output("transformers", program("Hugging Face transformers: Trainer"), TORCHRUN, tmp_path)
    losses = [float(each) for each in re.findall(r"^losses (.*)$", text, re.MULTILINE)[0].split()]
    assert len(losses) == 3, "128 sequences in batches of 8 on two ranks are 8 steps an epoch"
    assert losses[2] < losses[0]


@pytest.mark.conformance  # beside other tests it did not end once, and why is not known; not seen again in 24 runs
@pytest.mark.timeout(180)
def test_lightning(tmp_path: Path) -> None:
    text = output("lightning", program("PyTorch Lightning"), [], tmp_path, within_s=160.0)
    assert re.search(r"shardnet: loss [\d.]+", text)


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_ray(tmp_path: Path) -> None:
    text = output("ray", program("Ray Train"), [], tmp_path, within_s=390.0)
    found = re.findall(r"rank (\d) of 2 by shardnet: ([\d.]+) to ([\d.]+)", text)
    assert sorted({rank for rank, _, _ in found}) == ["0", "1"], text
    assert all(float(last) < float(first) for _, first, last in found)

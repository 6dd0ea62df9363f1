"""The program of docs/pytorch.md, as it stands there, started as it says."""

import re
import sys
from pathlib import Path

from tests.interop.sessions import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def test_the_program_of_the_page(tmp_path: Path) -> None:
    text = PAGE.read_text()
    found = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert "    torchrun --standalone --nproc-per-node 2 train.py\n" in text
    (tmp_path / "train.py").write_text(found[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ended = run(command, tmp_path, 55.0)
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 2
    assert losses[1] < losses[0]

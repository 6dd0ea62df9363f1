"""What the README shows works as it stands there."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.timeout(180)  # two fresh interpreters, on whatever machine
async def test_training_program(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    script = tmp_path / "train.py"
    script.write_text(program.group(1))
    command = (sys.executable, "-m", "shardnet.cli", "run", "--nproc", "2", str(script))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    losses = {int(rank): float(loss) for rank, loss in re.findall(r"rank (\d) of 2: loss ([\d.]+)", output)}
    assert losses.keys() == {0, 1}, output
    assert max(losses.values()) < 0.2, output  # untrained it is about 1


def test_files_named_in_the_readme_exist() -> None:
    root = README.parent
    for name in re.findall(r"`((?:shardnet|workers|docs|benchmarks|docker|protos)/[\w./-]+)`", README.read_text()):
        assert (root / name).exists(), name

"""workers/train_lm.py on a GPU."""

import os
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from tests.devices import needs_gpu

pytestmark = [needs_gpu, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]
SHARDNET = (sys.executable, "-c", "from shardnet.cli.main import main; raise SystemExit(main())")


@pytest.mark.parametrize("more", [(), ("--cpu-offload",), ("--precision", "bfloat16", "--compress", "int8-gradients")])
def test_the_example_trains(tmp_path: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from shardnet.cli.main import main; raise SystemExit(main())", "run", "--nproc", "2"]
    text = ("--text", str(ROOT / "README.md"), "--steps", "12", "--sample-bytes", "0", "--device", "cuda")
    ended = run(
        [*command, str(ROOT / "workers" / "train_lm.py"), "--", *text, *more],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(re.findall(r"validation loss ([\d.]+)", ended.stdout)[-1]) < 5.0, ended.stdout

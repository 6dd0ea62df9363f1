"""The examples of docs/testing.md work as printed, in a folder with nothing else, with the plugin that is installed with shardnet."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.timeout(180)  # fresh interpreters, perhaps on a slow machine
async def test_the_page(tmp_path: Path) -> None:
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    command = (sys.executable, "-m", "pytest", "-W", "error", "-p", "no:asyncio", "-p", "no:cacheprovider", ".")
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "4 passed" in output

"""What a process requests from the system."""

from pathlib import Path

from shardnet import process
from tests.training.workers import Nursery

BLOCKS = 200
BLOCK_BYTES = 100_000  # larger blocks malloc maps and returns to the system one by one


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def free_every_other() -> int:
    process.tune()
    blocks = [bytes([1]) * BLOCK_BYTES for _ in range(BLOCKS)]
    del blocks[::2]
    before = resident_bytes()
    process.return_freed_memory()
    returned = before - resident_bytes()
    print(f"{returned} bytes")
    return returned < BLOCKS // 2 * BLOCK_BYTES * 0.8


def test_what_is_freed_between_what_is_not_goes_back(nursery: Nursery) -> None:
    nursery.call("tests.test_process:free_every_other", within_s=30.0)

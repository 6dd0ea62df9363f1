"""What the fault scenarios measured: one JSON line for each in benchmarks/faults.jsonl."""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.resources import belongs_to_a_stranger

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.jsonl"
SHM = Path("/dev/shm")
SEED = 20_261_122


@dataclass
class Scenario:
    """One kind of fault, and the results of its repetitions. Times are in seconds after the fault."""

    name: str
    seed: int = 0
    repeats: int = 0
    detected_s: list[float] = field(default_factory=list)  # when each survivor knew of the fault
    resumed_s: list[float] = field(default_factory=list)  # when each survivor had the state of the next epoch
    steps_lost_max: int = 0  # committed ones
    parameters_equal: bool = True
    bytes_leaked: int = 0  # in /dev/shm
    rss_delta_bytes: int = 0  # growth of a worker that was there all the time
    measured: dict[str, float] = field(default_factory=dict)  # figures of this kind of fault only, by name

    def write(self, *, passed: bool, kept: bool = True) -> None:
        """Print the scenario's line, and add it to the file if it is kept."""
        line = {"scenario": self.name, "repeats": self.repeats, "passed": passed}
        for what in ("detected_s", "resumed_s"):
            values: list[float] = getattr(self, what)
            line |= {f"{what}_p50": _percentile(values, 50), f"{what}_p99": _percentile(values, 99)}
        line |= {name: getattr(self, name) for name in ("steps_lost_max", "bytes_leaked", "rss_delta_bytes", "parameters_equal", "seed")}
        line |= {name: round(value, 4) for name, value in self.measured.items()}
        text = json.dumps(line)
        if kept:
            with PATH.open("a") as file:
                file.write(text + "\n")
        print(text, flush=True)


@contextmanager
def scenario(name: str, seed: int = SEED, *, kept: bool = True) -> Iterator[Scenario]:
    """Figures that are written even if the scenario fails. Those of a short version are not `kept`."""
    figures = Scenario(name, seed)
    before = {path.name for path in SHM.iterdir()}
    passed = False
    try:
        yield figures
        left = [path for path in SHM.iterdir() if path.name not in before and not belongs_to_a_stranger(str(path))]
        figures.bytes_leaked = sum(path.stat().st_size for path in left if path.exists())
        passed = not left
        assert passed, f"something is left in /dev/shm: {left}"
    finally:
        figures.write(passed=passed, kept=kept)


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return round(values[0], 3) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 3)

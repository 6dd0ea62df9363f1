"""`TensorBoard`: event files, where `tensorboard` is installed (the extra `shardnet[tensorboard]`)."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.training.tracking.record import Record

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Event files, the first made at the first record. It replaces that step and all later ones of an earlier run. Where a run goes back,
    another file replaces what was written so far from that step on. A second report of a step adds to the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last: Record | None = None

    def __str__(self) -> str:
        return f"TensorBoard's events in {self._folder}"

    @staticmethod
    def is_installed() -> bool:
        return find_spec("tensorboard") is not None

    def write(self, record: Record) -> None:
        """Raises OSError."""
        if self._writer is not None and self._last is not None and _goes_back(self._last, record):
            self._writer.close()
            self._writer = None
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second, so only where it is used

            self._writer = SummaryWriter(str(self._folder), purge_step=record.step, flush_secs=5)
        self._last = record
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.at_s)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _goes_back(last: Record, now: Record) -> bool:
    """Whether a step is done again. The next epoch may begin with the very step that the last one has ended with."""
    return now.step < last.step or (now.step == last.step and now.epoch != last.epoch)

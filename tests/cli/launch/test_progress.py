"""How far the training is: asking workers, and saying it in words."""

import asyncio
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.progress import ProgressView, describe, follow
from shardnet.cli.units import short_bytes, short_duration, short_loss, short_number, short_time
from shardnet.errors import EndpointUnavailable
from shardnet.observation.views import Stats
from shardnet.telemetry import Progress
from tests.observation.views import stats


@pytest.mark.parametrize(
    ("progress", "wait_share", "remaining_s", "text"),
    [
        (Progress(120, 400, 2.31, 45_200), 0.124, 83.2, "step 120/400, loss 2.310, 45.2k tokens/s, comm wait 12%, eta 1:23"),
        (Progress(120, 400, 2.31, 45_200), None, None, "step 120/400, loss 2.310, 45.2k tokens/s"),
        (Progress(3), None, None, "step 3"),
        (Progress(3, 9, note="evaluating"), None, None, "step 3/9, evaluating"),
    ],
)
def test_what_is_unknown_is_left_out(progress: Progress, wait_share: float | None, remaining_s: float | None, text: str) -> None:
    assert describe(progress, wait_share, remaining_s) == text


def test_small_losses_are_shown() -> None:
    assert describe(Progress(3, loss=2.662e-6), None, None) == "step 3, loss 2.662e-06"
    assert [short_loss(v) for v in (0.0, 0.045, 2.31, 1023.4, 12_345.0)] == ["0.000", "0.04500", "2.310", "1023", "1.234e+04"]


@given(st.floats())
def test_any_number_has_a_text(value: float) -> None:
    """It may come from a worker that is not in order."""
    assert all(show(value) for show in (short_bytes, short_duration, short_loss, short_number, short_time))


def test_no_text_has_more_than_its_unit_holds() -> None:
    assert [short_number(v) for v in (0.3, 9.96, 999.5, 999_960, 999_960_000)] == ["0.3", "10", "1.0k", "1.0M", "1.0G"]
    assert [short_bytes(v) for v in (1023.6, (1 << 20) - 1, (1 << 30) - 1)] == ["1.0 KiB", "1.0 MiB", "1.0 GiB"]
    assert [short_time(v) for v in (0.9999, 0.99996, 59.99, 59.996)] == ["999.9 ms", "1.00 s", "59.99 s", "1:00"]
    infinite = [show(math.inf) for show in (short_number, short_bytes, short_duration, short_time)]
    assert infinite == ["inf", "inf B", "inf", "inf"]


def test_units() -> None:
    assert [short_number(v) for v in (0, 950, 45_200, 1.3e6, 2e9)] == ["0", "950", "45.2k", "1.3M", "2.0G"]
    assert [short_bytes(v) for v in (0, 1023, 1024, 46_285, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "45.2 KiB", "5.0 TiB"]
    assert [short_duration(v) for v in (0, 9.4, 83, 7445)] == ["0:00", "0:09", "1:23", "2:04:05"]


class Shown(ProgressView):
    """Keeps what it should show."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.steps: asyncio.Queue[int] = asyncio.Queue()

    async def show(self, stats: Stats) -> None:
        self.steps.put_nowait(stats.progress.step)


async def test_who_does_not_answer_does_not_hide_the_next_one() -> None:
    """For example a frozen worker that an elastic job goes on without."""

    async def ask(address: str) -> Stats:
        if address == "frozen:1":
            raise EndpointUnavailable("frozen:1 does not answer")
        return stats(progress=Progress(step=int(address.removeprefix("alive:"))))

    with Console(io.StringIO(), io.StringIO()) as console:
        view = Shown(console)
        following = asyncio.create_task(follow(lambda: ["frozen:1", "alive:2", "alive:3"], ask, view))
        assert await view.steps.get() == 2
        following.cancel()
        await asyncio.wait([following])
    assert view.steps.empty()

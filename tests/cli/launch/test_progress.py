"""How far the training is: asking workers, and saying it in words."""

import asyncio
import io

import pytest

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.progress import ProgressView, describe, follow
from shardnet.cli.units import short_bytes, short_duration, short_number
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

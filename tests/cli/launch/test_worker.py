"""One worker process."""

import io
import os
import signal
import sys

import pytest

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.start import Spawn
from shardnet.cli.launch.worker import Worker

FOR_EVER = (sys.executable, "-c", "import signal\nwhile True: signal.pause()")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_is_sent_before_the_start_reaches_it(number: signal.Signals) -> None:
    """For example a Ctrl-C that comes while the system makes the process."""
    with Console(io.StringIO(), io.StringIO()) as console:
        worker = Worker(0, console)
        if number is signal.SIGKILL:
            worker.kill()
        else:
            worker.signal(number)
        ended = await worker.run(Spawn(FOR_EVER), os.environ)
    assert (ended.code, ended.was_ended) == (-number, True)
    assert ended.started_s < ended.ended_s

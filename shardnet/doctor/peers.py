"""The other machines: each doctor joins as a worker does, tries the ports of the others, and then they measure each other."""

from typing import Any

from shardnet import process
from shardnet.config import Timeouts
from shardnet.credentials import DOCTOR
from shardnet.doctor.finding import Finding, problem
from shardnet.doctor.gathering import Apart, Gathering
from shardnet.doctor.links import measure
from shardnet.errors import CollectiveError, JoinRefused, JoinTimeout, ShardnetError
from shardnet.settings import Settings
from shardnet.training.last_words import LastWords
from shardnet.training.seat import Seat
from shardnet.training.station import open_station, take_seat
from shardnet.transport.grpc_mesh import ADVICE

# These win over the environment, whose values are for a training that may run at the same time with its own files and metrics port.
_OWN = {"elastic": False, "replacement": False, "wished_rank": -1, "report_file": "", "trace": "", "track": "", "flight": "", "metrics": ""}
_NOT_ALL_CAME = "run shardnet doctor on all machines at the same time, with the same --rendezvous, --job and --workers on each"
_REFUSED = "give --rendezvous, --job and --workers the same values on all machines; if other doctors of this job still run, wait for them"
_NO_MESH = (
    "this doctor has reached the ports of all others: see what those say that are named here. Something in between may end connections "
    "or drop large packets (a proxy, a wrong MTU)"
)


async def about_peers(workers: int, *, job: str, wait_s: float, **settings: Any) -> list[Finding]:
    """Wait for the others, try their ports, and measure.

    workers   how many doctors there are
    job       the job of their certificates; they meet in a separate job, and do not disturb this one
    wait_s    how long to wait for the others
    settings  of `connect`
    """
    sizes = {"min_world_size": workers, "max_world_size": workers}
    own = {"job": job + DOCTOR, "timeouts": Timeouts(join_s=wait_s)}
    try:
        return await _examine(Settings.from_environment(None, **sizes, **own, **_OWN, **settings))
    except JoinTimeout as error:
        return [problem("peers", str(error).partition("; ")[0], _NOT_ALL_CAME)]  # without the advice, which is for workers
    except JoinRefused as error:
        return [problem("peers", str(error), _REFUSED)]
    except ShardnetError as error:
        return [problem("peers", str(error))]


async def _examine(settings: Settings) -> list[Finding]:
    process.tune()
    gathering = Gathering(settings)
    measured: dict[int, Finding] = {}
    async with open_station(settings, gathering.meet, security=gathering.security) as station, gathering:
        try:
            await _measure(await take_seat(station, settings), measured)
        except Apart:
            trouble = ""
        except CollectiveError as error:
            trouble = str(error).removesuffix(f"; {ADVICE}")  # it leads to this command
        else:
            return gathering.about_ports(measured)
        await gathering.stay()
        found = [*gathering.about_ports(measured), *gathering.about_others()]
        return [*found, problem("peers", trouble, _NO_MESH)] if gathering.is_whole else found
    raise AssertionError("unreachable: neither hides an error")


async def _measure(seat: Seat, measured: dict[int, Finding]) -> None:
    try:
        await measure(seat.backend, seat.topology, measured)
    except BaseException as error:
        await seat.leave(LastWords.of(error))
        raise
    await seat.leave()

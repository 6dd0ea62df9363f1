"""Settings of `connect()`: where each comes from, and the error for one that makes no sense."""

import socket

import pytest

from shardnet.address import Address
from shardnet.collectives.route import Routing
from shardnet.config import Limits, NodeEngine, Timeouts
from shardnet.errors import AddressError, RendezvousUnavailable, UsageError
from shardnet.settings import Settings

LAUNCHED = {
    "SHARDNET_RENDEZVOUS": "127.0.0.1:7000",
    "SHARDNET_JOB": "j",
    "SHARDNET_WORLD_SIZE": "4",
    "SHARDNET_LOCAL_RANK": "1",
    "SHARDNET_WISHED_RANK": "3",
    "SHARDNET_LOCAL_WORLD_SIZE": "2",
    "SHARDNET_REPORT_FILE": "/dev/fd/3",
    "SHARDNET_NODE": "left",
    "SHARDNET_LISTEN": "::1",
    "SHARDNET_ELASTIC": "1",
    "SHARDNET_REPLACEMENT": "1",
    "SHARDNET_INSECURE": "1",
    "SHARDNET_SHARED_MEMORY": "0",
    "SHARDNET_ROUTING": "ring",
    "SHARDNET_TRACE": "trace.json",
    "SHARDNET_TRACK": "runs",
    "SHARDNET_FLIGHT": "records",
}


def test_without_variables_it_is_a_world_of_one() -> None:
    assert Settings.from_environment({}) == Settings()
    assert (Settings().rendezvous, Settings().min_world_size, Settings().max_world_size) == ("", 1, 1)


def test_every_variable_of_the_launcher_is_read() -> None:
    assert Settings.from_environment(LAUNCHED) == Settings(
        *("127.0.0.1:7000", "j", 4, 4, 1, 3, "left", "::1"),
        elastic=True,
        replacement=True,
        insecure=True,
        shared_memory=False,
        routing=Routing.RING,
        report_file="/dev/fd/3",
        trace="trace.json",
        track="runs",
        flight="records",
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_JOB", "from the process")
    assert Settings.from_environment().job == "from the process"


def test_misspelt_variables_are_found_with_those_that_were_meant() -> None:
    environment = {"SHARDNET_ROUTNG": "ring", "SHARDNET_WORLDSIZE": "1", "shardnet_job": "j", "SHARDNET_LIMITS": "1", "SHARDNET_FOO": "1"}
    assert list(Settings.misspelt(environment)) == [
        ("SHARDNET_ROUTNG", "SHARDNET_ROUTING"),
        ("SHARDNET_WORLDSIZE", "SHARDNET_WORLD_SIZE"),
        ("shardnet_job", "SHARDNET_JOB"),
    ]


def test_the_variables_that_there_are_are_none_of_them() -> None:
    kubernetes = dict.fromkeys(
        ["PORT", "SERVICE_HOST", "SERVICE_PORT", "RENDEZVOUS_SERVICE_HOST", "RENDEZVOUS_PORT", "RENDEZVOUS_PORT_29400_TCP_ADDR"], "10.0.0.1"
    )
    others = {f"SHARDNET_{name}": value for name, value in kubernetes.items()} | {"SHARDNET_TOKEN_FILE": "", "SHARDNET_METRICS": ""}
    assert not list(Settings.misspelt(LAUNCHED | others))


def test_least_and_greatest_world_size_win_over_the_common_one() -> None:
    found = Settings.from_environment(LAUNCHED | {"SHARDNET_MIN_WORLD_SIZE": "2", "SHARDNET_MAX_WORLD_SIZE": "8"})
    assert (found.min_world_size, found.max_world_size) == (2, 8)


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert Settings.from_environment(dict.fromkeys(LAUNCHED, "")) == Settings()


def test_what_is_given_wins() -> None:
    timeouts, limits = Timeouts.for_tests(), Limits(chunk_bytes=8)
    found = Settings.from_environment(LAUNCHED, job="k", insecure=False, min_world_size=1, timeouts=timeouts, limits=limits)
    assert (found.job, found.insecure, found.min_world_size, found.max_world_size) == ("k", False, 1, 4)
    assert (found.timeouts, found.limits) == (timeouts, limits)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"WORLD_SIZE": "two"}, "SHARDNET_WORLD_SIZE must be a whole number, got 'two'"),
        ({"MIN_WORLD_SIZE": "1.5"}, "SHARDNET_MIN_WORLD_SIZE must be a whole number, got '1.5'"),
        ({"MAX_WORLD_SIZE": "-"}, "SHARDNET_MAX_WORLD_SIZE must be a whole number, got '-'"),
        ({"LOCAL_RANK": "first"}, "SHARDNET_LOCAL_RANK must be a whole number, got 'first'"),
        ({"WISHED_RANK": "-2"}, "SHARDNET_WISHED_RANK must be a rank, or -1 for any, got -2"),
        ({"WISHED_RANK": "65536"}, "SHARDNET_WISHED_RANK must be a rank, or -1 for any, got 65536"),
        ({"LOCAL_RANK": "-1"}, "SHARDNET_LOCAL_RANK must not be negative, got -1"),
        (
            {"WORLD_SIZE": "0"},
            "the minimum world size is 0 (SHARDNET_WORLD_SIZE) and the maximum 0 (SHARDNET_WORLD_SIZE); choose 1 <= minimum <=",
        ),
        ({"WORLD_SIZE": "65537"}, "the maximum 65537 (SHARDNET_WORLD_SIZE); choose 1 <= minimum <= maximum <= 65536"),
        ({"MIN_WORLD_SIZE": "5"}, "the minimum world size is 5 (SHARDNET_MIN_WORLD_SIZE) and the maximum 4 (SHARDNET_WORLD_SIZE)"),
        (
            {"RENDEZVOUS": ""},
            "SHARDNET_WORLD_SIZE asks for 4 workers, but without SHARDNET_RENDEZVOUS they cannot meet; start the program with",
        ),
        ({"INSECURE": "true"}, "SHARDNET_INSECURE must be 0 or 1, got 'true'"),
        ({"SHARED_MEMORY": "no"}, "SHARDNET_SHARED_MEMORY must be 0 or 1, got 'no'"),
        ({"ROUTING": "star"}, "SHARDNET_ROUTING must be one of auto, ring, direct, rank-order, got 'star'"),
        ({"JOB": "two\nlines"}, r"SHARDNET_JOB 'two\nlines' has characters that cannot be printed"),
        ({"JOB": "j" * 257}, "SHARDNET_JOB has 257 characters; at most 256 are allowed"),
        ({"NODE": "\x1b[2J"}, r"SHARDNET_NODE '\x1b[2J' has characters that cannot be printed"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        Settings.from_environment(LAUNCHED | {f"SHARDNET_{name}": value for name, value in changes.items()})
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("rendezvous", "10.0.0.1", "'10.0.0.1' does not end in a port from 0 to 65535; write host:port, as in 10.0.0.1:7001"),
        ("rendezvous", "::1:7000", "'::1:7000' is not host:port; write an IPv6 address in brackets"),
        ("rendezvous", "unix:/tmp/socket", "'unix:/tmp/socket' does not end in a port"),
        ("rendezvous", "127.0.0.1:0", "'127.0.0.1:0' has port 0; give the port at which the rendezvous listens"),
        ("listen", "10.0.0.1:http", "'10.0.0.1:http' does not end in a port"),
        ("listen", "two words", "'two words:0' has no usable host name"),
        ("advertise", "relay", "'relay' does not end in a port"),
        ("advertise", "relay:0", "'relay:0' has port 0; give the port at which peers reach this worker"),
    ],
)
def test_an_address_that_is_none_is_named_by_where_it_came_from(name: str, value: str, complaint: str) -> None:
    with pytest.raises(AddressError) as from_variable:
        Settings.from_environment(LAUNCHED | {f"SHARDNET_{name.upper()}": value})
    assert str(from_variable.value).startswith(f"SHARDNET_{name.upper()}: {complaint}")
    with pytest.raises(AddressError) as from_call:
        Settings.from_environment(LAUNCHED, **{name: value})
    assert str(from_call.value).startswith(f"{name} of connect(): {complaint}")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"min_world_size": "2"}, "min_world_size of connect() must be of type int, got '2'"),
        ({"local_rank": True}, "local_rank of connect() must be of type int, got True"),
        ({"insecure": 1}, "insecure of connect() must be of type bool, got 1"),
        ({"token": b"secret"}, "token of connect() must be of type str, got '...'"),
        ({"rendezvous": None}, "rendezvous of connect() must be of type str, got None"),
        ({"timeouts": 5.0}, "timeouts of connect() must be of type Timeouts, got 5.0"),
        ({"routing": None}, "routing of connect() must be one of auto, ring, direct, rank-order, got None"),
        ({"node_engine": "mpi"}, "node_engine of connect() must be one of shardnet, nccl, gloo, got 'mpi'"),
        (
            {"node_engine": "gloo"},
            "node_engine of connect() 'gloo' needs routing 'auto', which tells nodes apart, but SHARDNET_ROUTING is 'ring'",
        ),
        ({"job": ""}, "job of connect() must not be empty"),
        ({"min_world_size": 9}, "the minimum world size is 9 (min_world_size of connect()) and the maximum 4 (SHARDNET_WORLD_SIZE)"),
        ({"rendezvous": ""}, "SHARDNET_WORLD_SIZE asks for 4 workers, but without rendezvous of connect() they cannot meet"),
        (
            {"world_size": 2, "rank": 1},
            "connect() has no setting rank, world_size; there are: rendezvous, job, min_world_size, max_world_size,",
        ),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        Settings.from_environment(LAUNCHED, **given)
    assert str(refused.value).startswith(complaint)


@pytest.mark.parametrize(
    ("listen", "bound"),
    [("", "127.0.0.1:0"), ("10.0.0.1", "10.0.0.1:0"), ("10.0.0.1:7001", "10.0.0.1:7001"), ("::1", "[::1]:0"), ("[::1]:7001", "[::1]:7001")],
)
async def test_what_to_listen_on(listen: str, bound: str) -> None:
    """The default is the address from which this machine reaches the rendezvous."""
    assert await Settings.from_environment(LAUNCHED, listen=listen).listen_address() == bound


async def test_peers_are_told_an_address_that_they_can_call() -> None:
    settings = Settings.from_environment(LAUNCHED)
    assert await settings.public_address("0.0.0.0:7001") == "127.0.0.1:7001"
    assert await settings.public_address("10.0.0.1:7001") == "10.0.0.1:7001"
    elsewhere = Settings.from_environment({**LAUNCHED, "SHARDNET_ADVERTISE": "example.org:9000"})
    assert await elsewhere.public_address("10.0.0.1:7001") == "example.org:9000"


async def test_a_rendezvous_whose_name_stays_unknown_is_unavailable() -> None:
    settings = Settings.from_environment(LAUNCHED, rendezvous="nowhere.invalid:7000", listen="", timeouts=Timeouts(connect_s=0.2))
    with pytest.raises(RendezvousUnavailable, match=r"name 'nowhere\.invalid' of the rendezvous could not be resolved within 0\.2 s"):
        await settings.listen_address()


def test_the_engine_inside_nodes_is_read() -> None:
    assert Settings.from_environment({"SHARDNET_NODE_ENGINE": "gloo"}).node_engine is NodeEngine.GLOO


@pytest.mark.parametrize("first", ["::1", "127.0.0.1"])
async def test_of_several_addresses_the_one_that_answers_counts(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may lead nowhere, for example where IPv6 is broken."""
    families = {"::1": socket.AF_INET6, "127.0.0.1": socket.AF_INET}
    for answering, family in families.items():
        with socket.socket(family) as rendezvous:
            try:
                rendezvous.bind((answering, 0))
            except OSError:
                pytest.skip("no IPv6 here")
            rendezvous.listen()
            port = rendezvous.getsockname()[1]
            order = sorted(families, key=lambda address: address != first)
            found = [(families[address], socket.SOCK_STREAM, 6, "", (address, port)) for address in order]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
            settings = Settings.from_environment(LAUNCHED, rendezvous=f"somewhere.example:{port}", listen="")
            assert await settings.listen_address() == str(Address(answering, 0))
        assert await settings.listen_address() == str(Address(first, 0)), "nobody answers yet"


async def test_where_there_is_no_route_that_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardnet.settings.settings.PATIENCE_S", 0.0)
    settings = Settings.from_environment(LAUNCHED, rendezvous="[fe80::1]:7000", listen="", timeouts=Timeouts(connect_s=0.2))
    with pytest.raises(RendezvousUnavailable, match=r"^this machine has no route to the rendezvous at \[fe80::1\]:7000: Invalid argument$"):
        await settings.listen_address()
    assert caplog.messages == ["the rendezvous at [fe80::1]:7000 cannot be reached yet: Invalid argument; trying again"]


def test_timeouts_may_come_from_the_environment() -> None:
    settings = Settings.from_environment({"SHARDNET_TIMEOUTS": "collective_s=300, join_s=60.5,"})
    assert settings.timeouts == Timeouts(collective_s=300.0, join_s=60.5)
    assert Settings.from_environment({"SHARDNET_TIMEOUTS": "collective_s=300"}, timeouts=Timeouts()).timeouts == Timeouts()
    assert Settings.from_environment({}).timeouts == Timeouts()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("300", r"SHARDNET_TIMEOUTS: '300' does not set a known timeout; write connect_s=SECONDS, join_s=SECONDS, "),
        ("collective=300", r"SHARDNET_TIMEOUTS: 'collective=300' does not set a known timeout"),
        ("collective_s=long", r"SHARDNET_TIMEOUTS: 'collective_s=long' must be a number of seconds, as in collective_s=60$"),
        ("collective_s=-1", r"SHARDNET_TIMEOUTS: .*collective_s"),
    ],
)
def test_timeouts_that_make_no_sense(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=f"^{complaint}"):
        Settings.from_environment({"SHARDNET_TIMEOUTS": text})

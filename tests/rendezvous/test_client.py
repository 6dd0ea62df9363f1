"""Joining, staying and leaving over real gRPC on loopback."""

import asyncio
import logging
import re
import socket
import time
from dataclasses import replace

import grpc
import pytest

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import JoinRefused, JoinTimeout, PlaintextRefused, ProtocolError, RendezvousUnavailable, StateError
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.pb import stats_pb2
from shardnet.rendezvous import client, joining, messages
from shardnet.rendezvous.client import join, status
from shardnet.rendezvous.events import JobState, Waiting
from shardnet.rendezvous.refusal import Refusal
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.handlers import Context, stream
from tests.promises import within_s
from tests.rendezvous.builders import worker
from tests.rendezvous.people import TIMEOUTS, Person, people, rendezvous
from tests.rendezvous.relay import relay
from tests.shared_loop import on_shared_loop


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestJoining:
    @on_shared_loop
    async def test_ranks_addresses_and_nodes_reach_everyone(self) -> None:
        requests = [
            worker(0, least=4, most=4, node="a"),
            worker(1, least=4, most=4, node="b"),
            worker(2, least=4, most=4, node="a", hint=1),
        ]
        async with rendezvous() as server, people(server.address, *requests, worker(3, least=4, most=4, node="b")) as workers:
            topologies = [(await w.joined).topology for w in workers]
            assert [t.rank for t in topologies] == [0, 2, 1, 3]
            assert len({t.members for t in topologies}) == 1
            assert [(m.address, m.node, m.local_rank, m.node_group) for m in topologies[0].members] == [
                ("10.0.0.1:7000", "a", 0, 0),
                ("10.0.0.1:7002", "a", 1, 0),
                ("10.0.0.1:7001", "b", 0, 1),
                ("10.0.0.1:7003", "b", 1, 1),
            ]
            assert topologies[0].epoch == 1

    @on_shared_loop
    async def test_minimum_starts_after_the_settling_time(self) -> None:
        async with rendezvous(settle_s=0.2) as server, people(server.address, worker(0, most=4), worker(1, most=4)) as workers:
            assert [(await w.joined).topology.world_size for w in workers] == [2, 2]

    @on_shared_loop
    async def test_waiting_tells_the_count(self) -> None:
        async with (
            rendezvous() as server,
            people(server.address, worker(0, least=3, most=3), worker(1, least=3, most=3)) as (first, second),
        ):
            assert await first.waiting.get() == Waiting(1, 3, 3)
            assert await first.waiting.get() == Waiting(2, 3, 3)
            await second.die()
            assert await first.waiting.get() == Waiting(1, 3, 3)

    @on_shared_loop
    async def test_place_of_a_vanished_joiner_is_free(self) -> None:
        async with (
            rendezvous() as server,
            people(server.address, worker(0, least=3, most=3), worker(1, least=3, most=3)) as (first, second),
        ):
            await first.die()
            while (await second.waiting.get()).joined != 1:
                pass
            async with people(server.address, worker(2, least=3, most=3), worker(3, least=3, most=3)) as others:
                assert [await w.rank() for w in (second, *others)] == [0, 1, 2]

    @on_shared_loop
    async def test_worker_that_comes_before_the_rendezvous(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        early = Person(address, worker(0))
        with pytest.raises(RendezvousUnavailable):  # a second worker has tried in vain by now, so the first has, too
            async with join(address, worker(9), timeouts=replace(TIMEOUTS, connect_s=0.5)):
                pass
        async with rendezvous(address), people(address, worker(1)) as (late,):
            assert {await early.rank(), await late.rank()} == {0, 1}
            await early.leave()

    @on_shared_loop
    async def test_a_replacement_waits_as_long_as_those_that_it_is_to_join(self) -> None:
        """Its rendezvous may be away: the others wait `join_s` for that, and in vain if it gives up after `connect_s`."""
        address = f"127.0.0.1:{free_port()}"
        short = replace(TIMEOUTS, connect_s=0.5)
        early = Person(address, replace(worker(0), replacement=True), short)
        with pytest.raises(RendezvousUnavailable):  # `connect_s` of the replacement is over long before
            async with join(address, worker(9), timeouts=replace(short, connect_s=2.0)):
                pass
        async with rendezvous(address), people(address, worker(1)) as (late,):
            assert {await early.rank(), await late.rank()} == {0, 1}
            await early.leave()

    @on_shared_loop
    async def test_rendezvous_that_restarts_while_the_world_forms(self) -> None:
        async with rendezvous() as server:
            address = server.address
            patient = Person(address, worker(0))
            await patient.arrived.wait()
        async with rendezvous(address), people(address, worker(1)) as (other,):
            assert {await patient.rank(), await other.rank()} == {0, 1}
            await patient.leave()

    @on_shared_loop
    async def test_waiting_for_others_is_not_silence(self) -> None:
        """A world may take longer to form than a rendezvous may take to answer."""
        timeouts = replace(TIMEOUTS, connect_s=1.0)
        async with rendezvous(settle_s=1.8) as server, people(server.address, worker(0, least=1), timeouts=timeouts) as (patient,):
            assert await patient.rank() == 0
            assert patient.waiting.qsize() == 1  # it has joined once

    @on_shared_loop
    async def test_silence_counts_from_the_last_word(self) -> None:
        """A rendezvous that goes away after a long wait may take as long to return as one that was not up at first."""
        timeouts = replace(TIMEOUTS, connect_s=1.5)
        async with rendezvous() as server:
            address = server.address
            patient = Person(address, worker(0), timeouts)
            await patient.arrived.wait()
            await asyncio.sleep(timeouts.connect_s)
        async with rendezvous(address), people(address, worker(1)) as (other,):
            assert {await patient.rank(), await other.rank()} == {0, 1}
            await patient.leave()

    @on_shared_loop
    async def test_broken_connection_that_the_rendezvous_has_not_noticed(self) -> None:
        """The worker's own old lease is in its way until keepalive ends that; the worker waits for it."""
        async with rendezvous() as server, relay(server.address) as between, people(between.address, worker(0)) as (patient,):
            between.hang_up()
            assert [(await patient.waiting.get()).joined for _ in range(2)] == [1, 1]
            async with people(server.address, worker(1)) as (other,):
                assert [await patient.rank(), await other.rank()] == [0, 1]

    @on_shared_loop
    async def test_cancelling_frees_the_place(self) -> None:
        async with rendezvous() as server:
            cancelled = Person(server.address, worker(0))
            await cancelled.arrived.wait()
            await cancelled.die()
            async with people(server.address, worker(1, address="10.0.0.1:7000"), worker(2)) as workers:
                assert [await w.rank() for w in workers] == [0, 1]


class TestFailures:
    @on_shared_loop
    async def test_nobody_answers(self) -> None:
        """The time is long enough for one try to fail even on a busy machine."""
        address = f"127.0.0.1:{free_port()}"
        started = time.monotonic()
        with pytest.raises(RendezvousUnavailable, match=rf"no rendezvous answered at {address} for 3 s \(last: .*refused.*start it with"):
            async with join(address, worker(0), timeouts=replace(TIMEOUTS, connect_s=3.0)):
                pass
        assert time.monotonic() - started < within_s(4.5)

    @on_shared_loop
    async def test_name_that_does_not_exist(self) -> None:
        timeouts = replace(TIMEOUTS, connect_s=0.5)
        with pytest.raises(RendezvousUnavailable, match=r"no rendezvous answered at nobody\.invalid:7000"):
            async with join("nobody.invalid:7000", worker(0), timeouts=timeouts, security=Security(insecure=True)):
                pass

    @on_shared_loop
    async def test_server_that_takes_the_connection_and_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            started = time.monotonic()
            with pytest.raises(RendezvousUnavailable, match=f"no rendezvous answered at {address}"):
                async with join(address, worker(0), timeouts=replace(TIMEOUTS, connect_s=0.5)):
                    pass
            assert time.monotonic() - started < 2.0

    @on_shared_loop
    async def test_server_that_cancels_the_call(self) -> None:
        """A stopping server cancels it; that is not a cancellation of the worker."""
        entered = asyncio.Event()

        async def endless(_: pb.JoinRequest, __: Context[pb.MembershipEvent]) -> None:
            entered.set()
            await asyncio.Event().wait()

        # not 127.0.0.1, where another test may be given the port once it is free, and answer
        other = Endpoint("127.0.0.2:0", limits=Limits(), timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply)
        other.add(grpc.method_handlers_generic_handler(messages.SERVICE, {"Join": stream(pb.JoinRequest, endless)}))
        async with other:
            caller = Person(other.address, worker(0), replace(TIMEOUTS, connect_s=0.5))
            await entered.wait()
            await other.aclose(grace_s=0.0)
        with pytest.raises(RendezvousUnavailable):
            await caller.joined

    @on_shared_loop
    async def test_too_few_in_time(self) -> None:
        timeouts = replace(TIMEOUTS, join_s=1.5)
        async with rendezvous() as server, people(server.address, worker(0, least=3, most=4)) as (first,):
            with pytest.raises(
                JoinTimeout, match=rf"job 'job': only 2 of 3 to 4 workers joined at {server.address} within 1\.5 s; start the missing"
            ):
                async with join(server.address, worker(1, least=3, most=4), timeouts=timeouts):
                    pass
            assert [(await first.waiting.get()).joined for _ in range(3)] == [1, 2, 1]  # so its place is free again

    @on_shared_loop
    async def test_who_gives_up_last_was_not_alone(self) -> None:
        async with rendezvous() as server:
            last = Person(server.address, worker(0, least=3, most=3), replace(TIMEOUTS, join_s=1.5))
            async with people(server.address, worker(1, least=3, most=3)) as (other,):
                await other.arrived.wait()
                while (await last.waiting.get()).joined < 2:
                    pass
            with pytest.raises(
                JoinTimeout, match=r"only 2 of 3 workers joined at .* within 1\.5 s \(1 of them had gone again by then\); start"
            ):
                await last.joined

    @pytest.mark.parametrize("hint", [0, 1])
    @on_shared_loop
    async def test_waiting_long_is_told_once_a_machine(
        self, hint: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(joining, "PATIENCE_S", 0.5)
        async with rendezvous() as server:
            with caplog.at_level(logging.WARNING), pytest.raises(JoinTimeout):
                async with join(server.address, worker(0, hint=hint), timeouts=replace(TIMEOUTS, join_s=1.0)):
                    pass
            told = f"job 'job': 1 of 2 workers have joined at {server.address}; waiting up to 1 s for the others"
            assert [record.getMessage() for record in caplog.records] == ([told] if hint == 0 else [])

    @on_shared_loop
    async def test_silence_of_the_rendezvous_is_told_before_it_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(joining, "PATIENCE_S", 0.1)
        address = f"127.0.0.1:{free_port()}"
        with caplog.at_level(logging.WARNING), pytest.raises(RendezvousUnavailable):
            async with join(address, worker(0), timeouts=replace(TIMEOUTS, connect_s=0.5)):
                pass
        assert [record.getMessage() for record in caplog.records] == [f"no rendezvous answers at {address} yet; trying for 0.5 s"]

    @pytest.mark.parametrize(
        ("number", "change", "reason", "text"),
        [
            (0, {"address": "10.0.0.9:9"}, Refusal.DUPLICATE_INCARNATION, "every start of a worker must make a new one"),
            (1, {"address": "10.0.0.1:7000"}, Refusal.DUPLICATE_ADDRESS, "belongs to a live worker"),
            (1, {"most": 5}, Refusal.WISH, "was started with 2 by"),
        ],
    )
    @on_shared_loop
    async def test_refusals_while_forming(self, number: int, change: dict[str, object], reason: Refusal, text: str) -> None:
        async with rendezvous() as server, people(server.address, worker(0)) as (first,):
            with pytest.raises(JoinRefused, match=text) as caught:
                async with join(server.address, worker(number, **change), timeouts=TIMEOUTS):  # type: ignore[arg-type]
                    pass
            assert caught.value.reason == reason
            async with people(server.address, worker(2)) as (second,):
                assert [await first.rank(), await second.rank()] == [0, 1]

    @on_shared_loop
    async def test_full_and_late(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rendezvous() as server, people(server.address, worker(0, most=2), worker(1, most=2)) as (first, second):
            await asyncio.gather(first.joined, second.joined)
            with pytest.raises(JoinRefused, match="is full") as caught:
                async with join(server.address, worker(2), timeouts=TIMEOUTS):
                    pass
            assert caught.value.reason == Refusal.FULL
            assert caught.value.__suppress_context__, "the traceback ends with our own words, and gRPC's are not printed above them"
            assert f"refused {worker(2).address} on node a: {caught.value}" in caplog.messages, "by names that its owner knows"
            await second.leave()
            with pytest.raises(JoinRefused, match="is already running") as caught:
                async with join(server.address, worker(3), timeouts=TIMEOUTS):
                    pass
            assert caught.value.reason == Refusal.RUNNING

    @on_shared_loop
    async def test_address_of_something_else_than_a_rendezvous(self) -> None:
        async with Endpoint("127.0.0.1:0", limits=Limits(), timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply) as other:
            with pytest.raises(ProtocolError, match=f"the server at {other.address} is not a rendezvous"):
                async with join(other.address, worker(0), timeouts=TIMEOUTS):
                    pass

    @on_shared_loop
    async def test_plaintext_off_this_machine(self) -> None:
        with pytest.raises(PlaintextRefused):
            async with join("192.0.2.1:7000", worker(0), timeouts=TIMEOUTS):
                pass

    @on_shared_loop
    async def test_entered_once(self) -> None:
        async with rendezvous() as server, join(server.address, worker(0, least=1, most=1), timeouts=TIMEOUTS) as membership:
            with pytest.raises(StateError, match="entered only once"):
                await membership.__aenter__()

    def test_topology_before_entering(self) -> None:
        with pytest.raises(StateError, match="not formed yet"):
            _ = join("127.0.0.1:1", worker(0)).topology


class TestStaying:
    @on_shared_loop
    async def test_goodbye_is_told_as_one(self) -> None:
        async with rendezvous() as server, people(server.address, worker(0), worker(1)) as (first, second):
            await asyncio.gather(first.joined, second.joined)
            await second.leave()
            assert await first.lost.get() == (1, "it left", True)

    @on_shared_loop
    async def test_crash_is_told_as_a_loss(self) -> None:
        async with rendezvous() as server, people(server.address, worker(0), worker(1)) as (first, second):
            await asyncio.gather(first.joined, second.joined)
            await first.die()
            assert await second.lost.get() == (0, "its connection to the rendezvous broke", False)

    @on_shared_loop
    async def test_job_is_finished_when_all_have_left_and_can_run_again(self) -> None:
        async with rendezvous() as server:
            for epoch in (1, 2):
                async with people(server.address, worker(2 * epoch), worker(2 * epoch + 1)) as workers:
                    assert [(await w.joined).topology.epoch for w in workers] == [epoch, epoch]
                    for leaver in workers:
                        await leaver.leave()
                (job,) = await status(server.address)
                assert (job.state, job.epoch, job.joined) == (JobState.FINISHED, epoch, 0)

    @on_shared_loop
    async def test_callback_that_fails_does_not_end_the_news(self, caplog: pytest.LogCaptureFixture) -> None:
        told: asyncio.Queue[int] = asyncio.Queue()

        def stumble(rank: int, reason: str, left: bool) -> None:
            told.put_nowait(rank)
            raise RuntimeError("stumbled")

        requests = worker(0, least=3, most=3), worker(1, least=3, most=3)
        async with (
            rendezvous() as server,
            people(server.address, *requests) as (first, second),
            join(server.address, worker(2, least=3, most=3), timeouts=TIMEOUTS, on_lost=stumble),
        ):
            await asyncio.gather(first.joined, second.joined)
            await first.leave()
            await second.leave()
            assert {await told.get(), await told.get()} == {0, 1}
        assert "stumbled" in caplog.text
        caplog.clear()  # the traceback in the record keeps the call alive, and with it its socket

    @on_shared_loop
    async def test_losing_the_rendezvous_costs_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        warned = asyncio.Event()

        def note(record: logging.LogRecord) -> bool:
            if record.levelno == logging.WARNING:
                warned.set()
            return True

        caplog.set_level(logging.INFO)
        caplog.handler.addFilter(note)
        async with rendezvous() as server:
            address = server.address
            staying = Person(address, worker(0, least=1, most=1))
            await staying.joined
        await warned.wait()
        assert staying.lost.empty()
        await staying.leave()  # without a rendezvous to say goodbye to
        assert "vanished" not in caplog.text  # in the rendezvous' own log: it was the rendezvous that went
        (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert f"[rank 0/1 epoch 1] the rendezvous at {address} is gone" in warning.getMessage()

    @pytest.mark.parametrize("soon", [True, False])
    @on_shared_loop
    async def test_only_a_rendezvous_that_is_away_for_a_while_costs_warnings(
        self, soon: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A load balancer may cut each connection after some time."""
        monkeypatch.setattr(client, "AWAY_S", 1e6 if soon else 0.0)
        back = asyncio.Event()

        def note(record: logging.LogRecord) -> bool:
            if re.search(r"\d is back$", record.getMessage()):
                back.set()
            return True

        caplog.set_level(logging.INFO)
        caplog.handler.addFilter(note)
        async with (
            rendezvous() as server,
            relay(server.address) as between,
            people(between.address, worker(0, least=1, most=1)) as (only,),
        ):
            await only.joined
            between.cut()
            await back.wait()
            await only.leave()
        where = f"[rank 0/1 epoch 1] the rendezvous at {between.address}"
        said = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == client.__name__]
        assert [level for level, _ in said] == ([logging.INFO] * 2 if soon else [logging.INFO, logging.WARNING, logging.WARNING])
        assert said[0][1].startswith(f"{where} is out of reach (")
        assert soon or said[1][1].startswith(f"{where} is gone (")
        assert said[-1][1] == f"{where} is back"

    @on_shared_loop
    async def test_leaving_logs_no_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rendezvous() as server, people(server.address, worker(0, least=1, most=1)) as (only,):
            await only.joined
            await only.leave()
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []

    @on_shared_loop
    async def test_abort_is_no_goodbye_even_if_closed_after(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rendezvous() as server, people(server.address, worker(0)) as (first,):
            async with join(server.address, worker(1), timeouts=TIMEOUTS) as membership:
                await first.joined
                membership.abort()
                assert await first.lost.get() == (1, "its connection to the rendezvous broke", False)
            await membership.aclose()  # closing twice is closing once
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_defaults_allow_a_slow_start() -> None:
    """The rendezvous may come up well after the workers, and workers minutes after each other."""
    assert Timeouts().connect_s >= 10
    assert Timeouts().join_s >= 300

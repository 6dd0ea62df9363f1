"""Any history of joins, goodbyes, losses and ticks keeps the promises of the membership."""

from collections.abc import Sequence
from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardnet.errors import JoinRefused
from shardnet.rendezvous.events import Assigned, JobState, Lost, Notice, Waiting
from shardnet.rendezvous.membership import Registry, RendezvousLimits
from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Topology

JOBS = ("x", "y", "z")
LIMITS = RendezvousLimits(max_jobs=2, max_members=7)


class Histories(RuleBasedStateMachine):
    """Workers come and go at random; `self.world` is what each live worker was told about its world."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(settle_s=2.0, limits=LIMITS)
        self.now = 0.0
        self.starts = 0
        self.live: dict[str, JoinRequest] = {}
        self.world: dict[str, Topology] = {}
        self.epochs: dict[str, int] = dict.fromkeys(JOBS, 0)

    @rule(
        job=st.sampled_from(JOBS),
        port=st.integers(1, 9),
        node=st.sampled_from("abc"),
        hint=st.integers(0, 2),
        least=st.integers(1, 3),
        more=st.integers(0, 2),
    )
    def join(self, job: str, port: int, node: str, hint: int, least: int, more: int) -> None:
        self.starts += 1
        request = JoinRequest(job, f"w{self.starts}", f"h:{port}", node, least, least + more, hint)
        before = self.registry.status()
        try:
            notices = self.registry.join(request, self.now)
        except JoinRefused:
            assert self.registry.status() == before
            return
        assert all(r.address != request.address for r in self.live.values() if r.job == job), "took a second worker at one address"
        self.live[request.incarnation] = request
        self.take(notices)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), left=st.booleans())
    def go(self, data: st.DataObject, left: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        gone = self.live.pop(name)
        world = self.world.pop(name, None)
        notices = self.registry.leave(gone.job, name) if left else self.registry.vanish(name)
        others = {n for n, r in self.live.items() if r.job == gone.job}
        assert {n.to for n in notices} == others
        for notice in notices:
            if world is None:
                assert isinstance(notice.event, Waiting)
            else:
                assert isinstance(notice.event, Lost)
                assert (notice.event.epoch, notice.event.rank, notice.event.left) == (world.epoch, world.rank, left)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.registry.tick(self.now))
        deadline = self.registry.deadline()
        assert deadline is None or deadline > self.now

    def take(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            assert notice.to in self.live, "told somebody who is gone"
            if isinstance(notice.event, Assigned):
                assert notice.to not in self.world, "gave a second rank"
                self.check_world(notice.to, notice.event.topology)
                self.world[notice.to] = notice.event.topology
        for job in {self.live[n.to].job for n in notices if isinstance(n.event, Assigned)}:
            members = [n for n, r in self.live.items() if r.job == job]
            assert all(n in self.world for n in members), "somebody was left out of the world"
            (epoch,) = {self.world[n].epoch for n in members}
            assert epoch > self.epochs[job], "an epoch came twice"
            self.epochs[job] = epoch

    def check_world(self, name: str, world: Topology) -> None:
        request = self.live[name]
        expected = {n for n, r in self.live.items() if r.job == request.job}
        assert [m.rank for m in world.members] == list(range(len(expected)))
        assert {m.incarnation for m in world.members} == expected
        assert world.me.incarnation == name
        assert len({m.address for m in world.members}) == world.world_size
        assert request.min_world_size <= world.world_size <= request.max_world_size
        runs = [(node, list(ranks)) for node, ranks in groupby(world.members, key=lambda m: m.node)]
        assert len({node for node, _ in runs}) == len(runs), "a node's ranks are not consecutive"
        for group, (_, run) in enumerate(runs):
            assert {m.node_group for m in run} == {group}
            assert [m.local_rank for m in run] == list(range(len(run)))
            hints = [self.live[m.incarnation].local_rank_hint for m in run]
            assert hints == sorted(hints)

    @invariant()
    def status_is_true(self) -> None:
        statuses = {s.job: s for s in self.registry.status()}
        assert len(statuses) <= LIMITS.max_jobs
        for job in JOBS:
            members = {n for n, r in self.live.items() if r.job == job}
            status = statuses.get(job)
            if status is None or status.state is JobState.FINISHED:
                assert not members
            elif status.state is JobState.FORMING:
                assert not status.members
                assert not any(n in self.world for n in members)
            else:
                assert {m.incarnation for m in status.members} == members
                assert all(self.world[m.incarnation].rank == m.rank for m in status.members)
            assert status is None or status.joined == len(members)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40)

"""Any history of an elastic job keeps the promises of its membership: nobody is left out, forgotten, or in two epochs at once."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardnet.errors import JoinRefused
from shardnet.rendezvous.events import Assigned, Ended, JobState, Joiners, Lost, Notice
from shardnet.rendezvous.membership import Registry
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Topology

LEAST, MOST, SETTLE_S, RETURN_S = 2, 4, 2.0, 5.0


class ElasticHistories(RuleBasedStateMachine):
    """Workers start, die, say goodbye, lose their connection, come back and move on to the next epoch at random."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(settle_s=SETTLE_S)
        self.now = 0.0
        self.starts = 0
        self.epoch = 0
        self.live: dict[str, JoinRequest] = {}
        self.world: dict[str, Topology] = {}  # what each live member was told
        self.gone: dict[str, tuple[JoinRequest, Topology]] = {}  # members of that epoch that have vanished or moved on
        self.absent: dict[str, float] = {}  # members without a connection that others wait for, and until when
        self.ended = False  # a member has said goodbye
        self.heard: dict[str, tuple[int, int]] = {}  # the last numbers of joiners and spares that each member was told
        self.over = False  # a member of the last epoch has said goodbye

    @rule(node=st.sampled_from("ab"))
    def start(self, node: str) -> None:
        self.starts += 1
        self._join(JoinRequest("job", f"w{self.starts}", f"h:{self.starts}", node, LEAST, MOST, elastic=True))

    @precondition(lambda self: self.may_move_on)
    @rule(data=st.data())
    def move_on(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.may_move_on)))
        before, world = self.may_move_on[name]
        self.starts += 1
        request = JoinRequest(
            *("job", f"w{self.starts}", before.address, before.node, LEAST, MOST), elastic=True, previous=name, last_epoch=world.epoch
        )
        if self._join(request, instead_of=name):
            assert not self.registry.is_member(name)

    @property
    def may_move_on(self) -> dict[str, tuple[JoinRequest, Topology]]:
        """The members, whose connections may have broken, and workers that have lost them while they waited for the next epoch."""
        absent = {name: each for name, each in self.gone.items() if each[0].address not in self.addresses}
        return absent | {name: (self.live[name], world) for name, world in self.world.items()}

    @property
    def addresses(self) -> list[str]:
        return [request.address for request in self.live.values()]

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """As the member that it was; the request may have been under way while it moved on."""
        name = data.draw(st.sampled_from(sorted(self.gone)))
        request, world = self.gone[name]
        try:
            notices = self.registry.resume(replace(request, resumes=True))
        except JoinRefused:
            forms = self.live and not self.world
            assert forms or request.address in self.addresses, "refused for no reason"
            return
        del self.gone[name]
        self.live[name], self.world[name] = request, world
        self._take(notices)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), left=st.booleans())
    def end(self, data: st.DataObject, left: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if left and name in self.world:
            self.ended = self.over = True
        self._forget(name, left=left)
        self._take(self.registry.leave("job", name) if left else self.registry.vanish(name))

    @precondition(lambda self: self.live.keys() - self.absent.keys())
    @rule(data=st.data())
    def lose_connection(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live.keys() - self.absent.keys())))
        notices = self.registry.disconnect(name, self.now + RETURN_S)
        if self.registry.is_member(name):
            assert self.world.keys() - self.absent.keys() == {name}, "others of its epoch are there, and find out that it is gone"
            assert not self.ended
            assert notices == []
            self.absent[name] = self.now + RETURN_S
            return
        self._forget(name)
        self._take(notices)

    @precondition(lambda self: self.absent)
    @rule(data=st.data())
    def connect_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.absent)))
        del self.absent[name]
        self._take(self.registry.resume(replace(self.live[name], resumes=True)))

    @rule()
    def time_passes(self) -> None:
        self.now += SETTLE_S
        notices = self.registry.tick(self.now)
        for name in [name for name, until in self.absent.items() if until <= self.now]:
            self._forget(name)
        self._take(notices)

    def _forget(self, name: str, *, left: bool = False) -> None:
        """A live worker is no longer there."""
        request, world = self.live.pop(name), self.world.pop(name, None)
        if world is not None and not left:
            self.gone[name] = request, world
        self.heard.pop(name, None)
        self.absent.pop(name, None)

    def _join(self, request: JoinRequest, *, instead_of: str = "") -> bool:
        try:
            notices = self.registry.join(request, self.now)
        except JoinRefused as refusal:
            if refusal.reason != Refusal.ENDED or not self.ended or not (self.world or request.last_epoch):
                raise  # without members a job may start again with new workers
            return False
        if not self.live:
            if self.ended:
                self.gone.clear()
            self.ended = False
        if instead_of in self.world:
            self.gone[instead_of] = self.live[instead_of], self.world[instead_of]
        for known in (self.live, self.world, self.heard, self.absent):
            known.pop(instead_of, None)
        self.live[request.incarnation] = request
        self._take(notices)
        return True

    def _take(self, notices: Sequence[Notice]) -> None:
        new = {notice.to: notice.event.topology for notice in notices if isinstance(notice.event, Assigned)}
        for notice in notices:
            assert notice.to in self.live, "told somebody who is gone"
            match notice.event:
                case Lost(epoch):
                    assert epoch == self.world[notice.to].epoch
                case Joiners(count, spares):
                    self.heard[notice.to] = count, spares
                case Ended():
                    assert self.ended
                    assert notice.to not in self.world
                    del self.live[notice.to]
        if new:
            assert not self.world, "an epoch began before the one before had ended"
            (epoch,) = {world.epoch for world in new.values()}
            assert epoch > self.epoch
            assert LEAST <= len(new) <= MOST
            for name, world in new.items():
                assert {member.incarnation for member in world.members} == set(new)
                assert world.me.incarnation == name
            self.epoch, self.world, self.over = epoch, new, False
            self.gone.clear()

    @invariant()
    def nobody_is_there_twice(self) -> None:
        assert len(set(self.addresses)) == len(self.live)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.world or not self.live:
            return
        (status,) = self.registry.status()
        assert status.state is JobState.FORMING
        assert len(self.live) < LEAST or self.registry.deadline() is not None

    @invariant()
    def members_know_who_waits(self) -> None:
        for name in self.world:
            waiting = len(self.live) - len(self.world)
            joiners = min(MOST - len(self.world), waiting)
            assert self.heard.get(name, (0, 0)) == (joiners, waiting - joiners), "a member does not know who waits"

    @invariant()
    def status_is_true(self) -> None:
        for status in self.registry.status():
            assert {member.incarnation for member in status.members} == set(self.world)
            assert status.joined == len(self.live)
            if not self.live:
                assert status.state is (JobState.FINISHED if self.over else JobState.LOST)


TestElasticHistories = ElasticHistories.TestCase
TestElasticHistories.settings = settings(max_examples=150, stateful_step_count=40)

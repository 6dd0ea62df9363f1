"""Workers that die, freeze and come back while they train, again and again. Each scenario writes a line of figures: ledger.py."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from shardnet.loop import LoopThread
from shardnet.rendezvous.client import status
from shardnet.testing.namespaces import Namespace, Network
from tests.elastic.lessons import Class, lesson
from tests.faults.ledger import SEED, Scenario, scenario
from tests.networks import nodes_or_skip
from tests.rendezvous.process import rendezvous_process
from tests.training.workers import Nursery, Worker

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("SHARDNET_FAULT_KILLS", "50"))  # of each kind of scenario
CHURN_S = float(os.environ.get("SHARDNET_FAULT_CHURN_S", "600"))
BOTH_WAYS = "from and to a node"
GROWTH_BYTES = 32 * 2**20  # memory in use goes up and down by this
DETECTED_S, FROZEN_S, CUT_S, RESUMED_S, RETURNED_S = 1.0, 4.0, 4.5, 5.0, 2.0  # what is promised


def note_loss(figures: Scenario, learners: Class, fault_s: float, *, world_size: int) -> None:
    """Note when the survivors notice a loss and resume; check that they resume with the same bits."""
    figures.detected_s += [each["at_s"] - fault_s for each in learners.all_hear("failed")]
    try:
        resumed = learners.resumed(world_size)
    except AssertionError:
        figures.parameters_equal = False
        raise
    figures.resumed_s.append(resumed["at_s"] - fault_s)
    # a step that was reported as committed must not be lost
    figures.steps_lost_max = max(figures.steps_lost_max, learners.committed - resumed["step"])
    learners.committed = resumed["step"]
    figures.repeats += 1


def within_promises(figures: Scenario, *, detected_s: float = DETECTED_S) -> None:
    assert figures.steps_lost_max <= 0, "a committed step was lost"
    assert max(figures.resumed_s) <= RESUMED_S + detected_s
    assert sorted(figures.detected_s)[int(0.99 * len(figures.detected_s))] <= detected_s


def rss(worker: Worker) -> int:
    return int(psutil.Process(worker.pid).memory_info().rss)


@pytest.mark.parametrize("place", ["forward", "backward", "committed"])
def test_a_worker_is_killed(nursery: Nursery, place: str) -> None:
    """It dies in a forward, while units are gathered; in a backward, while gradients are reduced; or between steps."""
    with scenario(f"kill -9 of a worker: {place}") as figures, lesson(nursery, least=3, most=4) as learners:
        for _ in range(3):
            learners.enrol()
        early = 0
        for number in range(KILLS):
            victim = learners.enrol(dies=place, at=1 + number % 3)
            learners.resumed(4)
            died = learners.hear(victim, "dies")
            learners.learners.remove(victim)
            assert victim.end() == -signal.SIGKILL
            note_loss(figures, learners, died["at_s"], world_size=3)
            if number == KILLS // 2:  # by then a worker's pools are as large as they get
                early = rss(learners.learners[0])
        figures.rss_delta_bytes = rss(learners.learners[0]) - early
        learners.end()
        within_promises(figures)
        assert figures.rss_delta_bytes < GROWTH_BYTES


def test_a_whole_node_is_killed(nursery: Nursery) -> None:
    rng = random.Random(SEED)
    with scenario("kill -9 of a node") as figures, lesson(nursery, least=2, most=4) as learners:
        for _ in range(2):
            learners.enrol(node="stays")
        for number in range(max(1, KILLS // 3)):
            victims = [learners.enrol(node=f"goes {number}") for _ in range(2)]
            # one newcomer may be taken in before the other
            sizes = [_wait_for_four(learners, victims)]
            assert sizes == [4]
            for _ in range(rng.randrange(3)):
                learners.hear(learners.learners[0], "step")
            fault_s = min(victim.signal(signal.SIGKILL) for victim in victims)
            for victim in victims:
                learners.learners.remove(victim)
                assert victim.end() == -signal.SIGKILL
            note_loss(figures, learners, fault_s, world_size=2)
        learners.end()
        within_promises(figures)


def _wait_for_four(learners: Class, newcomers: list[Worker]) -> int:
    """Wait until all four have resumed together; the older workers may have resumed as three before."""
    for learner in learners.learners:
        while (size := int(learners.hear(learner, "resumed")["world_size"])) < 4:
            assert learner not in newcomers or size == 3
    return size


@pytest.mark.parametrize(("seconds", "repeats"), [(8.0, 5), (30.0, 1)])
def test_a_worker_freezes_and_comes_back(nursery: Nursery, seconds: float, repeats: int) -> None:
    with scenario(f"SIGSTOP for {seconds:g} s") as figures, lesson(nursery, least=3, most=4) as learners:
        for _ in range(4):
            learners.enrol()
        learners.resumed(4)
        for _ in range(repeats):
            frozen = learners.learners.pop()
            frozen_s = frozen.signal(signal.SIGSTOP)
            note_loss(figures, learners, frozen_s, world_size=3)
            learners.let_pass(frozen_s + seconds)  # the fault's own length
            frozen.signal(signal.SIGCONT)
            learners.hear(frozen, "failed")
            learners.learners.append(frozen)
            assert learners.resumed(4)["step"] > learners.committed - 2
        learners.end()
        within_promises(figures, detected_s=FROZEN_S)


@pytest.mark.parametrize("way", [BOTH_WAYS, "to a node"])
def test_a_node_is_cut_off_for_ten_seconds(nursery: Nursery, way: str) -> None:
    """One of four nodes, each with a network of its own: one new epoch begins without it, and another when it is back."""
    if way != BOTH_WAYS and shutil.which("nft") is None:
        pytest.skip("there is no 'nft' to drop packets with (nftables)")
    with ExitStack() as stack:
        network = stack.enter_context(nodes_or_skip(4))
        _, address = stack.enter_context(rendezvous_process(f"{network.hub.address}:7000", namespace=network.hub))
        figures = stack.enter_context(scenario(f"all is lost for 10 s {way}"))
        learners = stack.enter_context(lesson(nursery, least=2, most=4, address=address))
        number_of = {
            learners.enrol(namespace=node.name, node=node.name, insecure=True): number for number, node in enumerate(network.nodes)
        }
        epoch = learners.resumed(4)["epoch"]
        for _ in range(5):
            cut = learners.learners.pop()
            cut_s = time.monotonic()
            with cut_off(network, number_of[cut], way):
                note_loss(figures, learners, cut_s, world_size=3)
                committed = learners.committed
                learners.hear(cut, "failed")
                assert learners.committed <= committed + 1, "the one that was cut off has gone on"
                learners.committed = committed
                learners.let_pass(cut_s + 10.0)  # the fault's own length
            learners.learners.append(cut)
            back = learners.resumed(4)
            assert back["epoch"] == epoch + 2, "epochs came and went"
            epoch = back["epoch"]
        learners.end()
        within_promises(figures, detected_s=CUT_S)


def test_a_pause_of_a_second_is_no_death(nursery: Nursery) -> None:
    with scenario("SIGSTOP for 1 s") as figures, lesson(nursery, least=3, most=4) as learners:
        for _ in range(4):
            learners.enrol()
        learners.resumed(4)
        for number in range(10):
            paused = learners.learners[number % 4]
            paused.signal(signal.SIGSTOP)
            time.sleep(1.0)  # the fault's own length
            paused.signal(signal.SIGCONT)
            before = learners.committed
            for learner in learners.learners:
                while learners.hear(learner, "step")["step"] < before + 2:  # "failed" would be an error here
                    pass
            figures.repeats += 1
        learners.end()


@pytest.mark.parametrize(("seconds", "repeats"), [(5.0, 5), (120.0, 1)])
def test_the_rendezvous_is_killed_and_comes_back(nursery: Nursery, tmp_path: Path, seconds: float, repeats: int) -> None:
    state = tmp_path / "rendezvous.db"

    with ExitStack() as stack:
        running, address = stack.enter_context(rendezvous_process("127.0.0.1:0", state))
        figures = stack.enter_context(scenario(f"rendezvous killed for {seconds:g} s"))
        learners = stack.enter_context(lesson(nursery, least=3, most=4, address=address))
        for _ in range(4):
            learners.enrol()
        learners.resumed(4)
        for _ in range(repeats):
            running.kill()
            before = learners.committed
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                for learner in learners.learners:  # each worker goes on, step by step
                    learners.hear(learner, "step")
            assert learners.committed > before
            running, same = stack.enter_context(rendezvous_process(address, state))
            assert same == address
            back_s = time.monotonic()
            figures.resumed_s.append(_until_known(address, 4) - back_s)
            figures.repeats += 1
        victim = learners.learners.pop()
        note_loss(figures, learners, victim.signal(signal.SIGKILL), world_size=3)
        learners.end()
        assert max(figures.resumed_s[:-1]) <= RETURNED_S


@contextmanager
def cut_off(network: Network, number: int, way: str) -> Iterator[None]:
    """Meanwhile everything that is sent to a node is lost, and with BOTH_WAYS everything that it sends as well."""
    if way == BOTH_WAYS:
        _within(network.hub, f"ip link set port{number} down")
    else:
        _within(network.nodes[number], "nft add table inet cut")
        _within(network.nodes[number], "nft add chain inet cut in { type filter hook input priority 0 ; policy drop ; }")
    try:
        yield
    finally:
        if way == BOTH_WAYS:
            _within(network.hub, f"ip link set port{number} up")
        else:
            _within(network.nodes[number], "nft delete table inet cut")


def _within(namespace: Namespace, line: str) -> None:
    subprocess.run(namespace.command(*line.split()), check=True, timeout=10)


def _until_known(address: str, members: int) -> float:
    """Wait until a rendezvous has all of its members back; return when."""
    while True:
        (job,) = LoopThread.shared().run(status(address)).result(10.0)
        if (len(job.members), job.absent) == (members, 0):
            return time.monotonic()


@pytest.mark.timeout(60.0 + 20.0 * KILLS)
def test_workers_leave_and_another_one_dies(nursery: Nursery) -> None:
    """One or two of four get SIGTERM, and less than a second later, at any moment of their departure, another one is killed. No step that
    was committed is lost, with one copy of each part."""
    rng = random.Random(SEED)
    with scenario("SIGTERM, then SIGKILL") as figures, lesson(nursery, least=1, most=4) as learners:
        for _ in range(4):
            learners.enrol()
        learners.resumed(4)
        while not learners.committed:
            learners.let_pass(time.monotonic() + 0.1)
        for _ in range(KILLS):
            stays, *others = learners.learners
            rng.shuffle(others)
            victim, *leavers = others[: rng.choice((2, 3))]
            learners.let_pass(time.monotonic() + rng.uniform(0.2, 0.6))
            told_s = min(leaver.signal(signal.SIGTERM) for leaver in leavers)
            learners.learners = [each for each in learners.learners if each not in leavers]
            learners.let_pass(told_s + rng.uniform(0.0, 0.8))
            victim.signal(signal.SIGKILL)
            learners.learners.remove(victim)
            assert victim.end() == -signal.SIGKILL
            assert {leaver.ended() for leaver in leavers} == {128 + signal.SIGTERM}
            while len(learners.learners) < 4:
                learners.enrol()
            figures.resumed_s.append(_until_all_are_back(learners, stays) - told_s)
            figures.repeats += 1


def _until_all_are_back(learners: Class, stays: Worker) -> float:
    """Check what one that stays goes through until four are there again; return when."""
    while True:
        message = stays.hear_any()
        if message["what"] == "step":
            assert message["step"] == learners.committed + 1, "a committed step was lost, or came again"
            learners.committed = message["step"]
        elif message["what"] == "resumed":
            # a commit that ends the epoch is not reported
            assert message["step"] in (learners.committed, learners.committed + 1), "a committed step was lost"
            assert message["digest"] == message["committed"], "the state is not what was committed"
            learners.committed = message["step"]
            if message["world_size"] == 4:
                return float(message["at_s"])
        else:
            assert message["what"] == "failed", message


@pytest.mark.timeout(CHURN_S + 300.0)
def test_workers_come_and_go(nursery: Nursery) -> None:
    """Two to six workers; every 0.5 to 2 seconds one starts or is killed. There is a commit at least every 30 s, and no memory grows."""
    rng = random.Random(SEED)
    with scenario("churn") as figures, lesson(nursery, least=2, most=6) as learners:
        for _ in range(4):
            learners.enrol()
        stays = learners.learners[0]
        ends_s = time.monotonic() + CHURN_S
        last_commit_s, longest_s, early, kills = time.monotonic(), 0.0, 0, 0
        while time.monotonic() < ends_s:
            acts_s = time.monotonic() + rng.uniform(0.5, 2.0)
            while time.monotonic() < acts_s:
                message = stays.hear_any()
                assert message["what"] in ("step", "failed", "resumed"), message
                if message["what"] == "step":
                    assert message["step"] > learners.committed, "a committed step came again"
                    learners.committed = message["step"]
                    longest_s = max(longest_s, message["at_s"] - last_commit_s)
                    last_commit_s = message["at_s"]
            if rng.random() < 0.6 and len(learners.learners) < 6:
                learners.enrol()
            elif len(learners.learners) > 2:
                victim = learners.learners.pop(rng.randrange(1, len(learners.learners)))
                victim.signal(signal.SIGKILL)
                assert victim.end() == -signal.SIGKILL
                kills += 1
            for learner in learners.learners:
                learner.listen()
            figures.repeats += 1
            early = early or (rss(stays) if figures.repeats > 20 else 0)
        figures.rss_delta_bytes = rss(stays) - early
        figures.resumed_s = [longest_s]
        print(f"{figures.repeats} events, {kills} kills, {learners.committed} steps, longest without a commit {longest_s:.1f} s")
        assert longest_s <= 30.0

"""`Stages`: the torch process groups and streams of a backend, from first use to end."""

import asyncio
from collections import deque

from shardnet.backend.stage import Stage
from shardnet.backend.torch_group import TorchGroup
from shardnet.collectives.group import Group
from shardnet.collectives.operation import Operation
from shardnet.collectives.switchboard import Switchboard
from shardnet.errors import CollectiveError


class Stages:
    """The stages of one group's collectives; lives until its backend is gone, or the mesh closed. Loop thread, unless stated otherwise."""

    def __init__(self, board: Switchboard, group: Group) -> None:
        """Any thread."""
        self._board = board
        self._group = group
        self._stages: list[Stage] = []
        self._broken = ""  # why there are no process groups any more
        self._under_way: set[Operation] = set()
        # the numbers of the last collectives that went over them: no rank can be further behind than this
        self._passed: deque[int] = deque(maxlen=board.limits.max_outstanding)
        group.at_failure_elsewhere.append(self._on_failure_elsewhere)
        board.at_loss.append(self._on_loss)
        board.at_end.append(self._end)

    def add(self, purpose: str, group: TorchGroup | None = None) -> Stage:
        """Add a stage, before anything is under way. Any thread."""
        stage = Stage(f"shardnet-torch-{self._board.mesh.rank}-{purpose}", group)
        self._stages.append(stage)
        return stage

    def enter(self, op: Operation) -> None:
        """A collective that goes over the stages begins. Raises CollectiveError if they are broken."""
        if self._broken:
            raise CollectiveError(
                f"{self._board.where()} {op.name}: {self._group.party.title} has no torch process group any more, because {self._broken}; "
                "make a new sub-group, or reform the cluster"
            )
        self._under_way.add(op)

    def leave(self, op: Operation) -> None:
        self._under_way.discard(op)

    def passed(self, op: Operation) -> None:
        """A collective has ended well; on a GPU that only means that it is launched at all stages."""
        self._passed.append(op.sequence)

    def break_up(self, reason: str, by: Operation | None = None) -> None:
        """Throw the process groups away, and fail what is under way on them; if the failure of `by` is the reason, only after that one."""
        if self._broken:
            return
        self._broken = reason
        self._close(broken=True)
        if by is None:
            self._fail_all()
        else:  # so that all ranks hear of that failure first
            by.result.add_done_callback(lambda _: self._board.loop.call(self._fail_all))

    def _fail_all(self) -> None:
        for op in [each for each in self._under_way if each.error is None]:
            self._group.fail(op, CollectiveError(f"{self._board.where()} {op.name} cannot go on, because {self._broken}"))

    def release(self) -> None:
        """Free everything: nobody can call anything on the stages any more. Any thread."""
        self._board.loop.call(self._release)

    def _release(self) -> None:
        self._close(broken=False)
        self._board.at_loss.remove(self._on_loss)
        self._group.at_failure_elsewhere.remove(self._on_failure_elsewhere)
        ends = self._end(False)
        if ends:
            asyncio.gather(*ends).add_done_callback(lambda _: self._board.at_end.remove(self._end))
        else:
            self._board.at_end.remove(self._end)

    def _on_loss(self, rank: int) -> None:
        """A rank is lost: on a GPU, a launched collective has ended as far as this rank knows, but may wait there for the lost rank."""
        if rank in self._group.members:
            self.break_up(f"rank {rank} was lost")

    def _on_failure_elsewhere(self, sequence: int) -> None:
        """Another rank has failed in a collective that has ended here. This rank may have left its rest to the GPU, which may wait there
        for the other rank."""
        if sequence in self._passed:
            self.break_up(f"collective #{sequence} failed on another rank")

    def _end(self, aborted: bool) -> list["asyncio.Future[None]"]:
        self._close(broken=aborted)
        return [stage.line.ended for stage in self._stages if stage.line.ended is not None]

    def _close(self, *, broken: bool) -> None:
        for stage in self._stages:
            stage.close(broken=broken)

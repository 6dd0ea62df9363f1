"""`Pace`: how long the steps of a training take."""

from dataclasses import dataclass, field, replace

from shardnet.histogram import Histogram


@dataclass(slots=True)
class Pace:
    """The time between steps, from the training's reports of steps done; lives as long as its telemetry, which holds a lock over it.

    The time between two epochs does not count as a step, nor does going back to an earlier step.
    """

    times: Histogram = field(default_factory=Histogram)
    seconds: float = 0.0  # the sum of these times
    exposed_s: float = 0.0  # the part of it in which the training thread waited for communication
    _step: int = 0
    _since_ns: int = 0  # when the current step began; 0: unknown
    _exposed_ns: int = 0  # all waiting by then

    def reach(self, step: int, now_ns: int, exposed_ns: int) -> None:
        """Note that `step` steps are done; saying the same twice counts once. `exposed_ns` is all waiting so far."""
        if self._since_ns and step == self._step:
            return
        done = step - self._step
        if self._since_ns and done > 0:
            elapsed_ns = now_ns - self._since_ns
            self.times.add(elapsed_ns // done, done)
            self.seconds += elapsed_ns / 1e9
            self.exposed_s += (exposed_ns - self._exposed_ns) / 1e9
        self._step, self._since_ns, self._exposed_ns = step, now_ns, exposed_ns

    def pause(self) -> None:
        """Do not count the time until the next report of a step."""
        self._since_ns = 0

    def copy(self) -> "Pace":
        return replace(self, times=self.times.copy())

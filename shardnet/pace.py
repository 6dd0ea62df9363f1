"""`Pace`: how long the steps of a training take."""

from dataclasses import dataclass, field, replace

from shardnet.histogram import Histogram


@dataclass(slots=True)
class Pace:
    """The time between steps, as the training says that it has done them; lives as long as its telemetry, which holds a lock over it.

    What lies between two epochs is no step, nor is going back.
    """

    times: Histogram = field(default_factory=Histogram)
    seconds: float = 0.0  # that these took
    exposed_s: float = 0.0  # of them the training thread waited for communication
    _step: int = 0
    _since_ns: int = 0  # 0: nothing is known to have begun
    _exposed_ns: int = 0  # by then

    def reach(self, step: int, now_ns: int, exposed_ns: int) -> None:
        """So many steps are done; saying it twice is saying it once. `exposed_ns` is all waiting so far."""
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
        """What comes until the next step is said to be done is none."""
        self._since_ns = 0

    def copy(self) -> "Pace":
        return replace(self, times=self.times.copy())

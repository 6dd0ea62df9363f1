"""`OptimizationEfficiency`: one score of how well the time was spent."""

from dataclasses import dataclass

COMPUTE_WEIGHT, MEMORY_WEIGHT, UPDATE_WEIGHT = 0.5, 0.3, 0.2


@dataclass(slots=True)
class OptimizationEfficiency:
    """Times in ns, and efficiencies from 0 to 1 of memory and parameter updates, which stay 1 until they are updated.

    Communication counts in full here, even where compute hides it; `TrainingFigures` says how much was not hidden.
    """

    compute_time: int = 0
    communication_time: int = 0
    memory_efficiency: float = 1.0
    parameter_update_efficiency: float = 1.0
    measurements: int = 0  # the weight of this rank's efficiencies in a merge

    @property
    def compute_ratio(self) -> float:
        """compute / (compute + communication); 1 before either."""
        total = self.compute_time + self.communication_time
        return self.compute_time / total if total else 1.0

    @property
    def communication_ratio(self) -> float:
        return 1 - self.compute_ratio

    @property
    def training_efficiency(self) -> float:
        """The weighted score, from 0 to 1."""
        score = (
            COMPUTE_WEIGHT * self.compute_ratio + MEMORY_WEIGHT * self.memory_efficiency + UPDATE_WEIGHT * self.parameter_update_efficiency
        )
        return _clamp(score)

    def record_compute(self, duration: int) -> None:
        self.compute_time += duration
        self.measurements += 1

    def record_communication(self, duration: int) -> None:
        self.communication_time += duration
        self.measurements += 1

    def update_memory_efficiency(self, efficiency: float) -> None:
        self.memory_efficiency = _clamp(efficiency)
        self.measurements += 1

    def update_parameter_efficiency(self, efficiency: float) -> None:
        self.parameter_update_efficiency = _clamp(efficiency)
        self.measurements += 1

    def merge(self, other: "OptimizationEfficiency") -> None:
        """Times add; efficiencies are weighted by measurements."""
        self.compute_time += other.compute_time
        self.communication_time += other.communication_time
        total = self.measurements + other.measurements
        if total:
            share = other.measurements / total
            self.memory_efficiency += share * (other.memory_efficiency - self.memory_efficiency)
            self.parameter_update_efficiency += share * (other.parameter_update_efficiency - self.parameter_update_efficiency)
        self.measurements = total


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)

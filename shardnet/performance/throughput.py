"""`ThroughputMetrics`: tokens per second of forward and backward passes."""

from dataclasses import dataclass

NS = 1e9  # ns in a second
SMOOTHING = 0.1  # weight of the newest sample in the rolling average


@dataclass(slots=True)
class ThroughputMetrics:
    """Tokens and times in ns. Forward and backward count the same tokens twice: see `TrainingFigures` for a rate that does not."""

    total_forward_tokens: int = 0
    total_backward_tokens: int = 0
    total_forward_time: int = 0
    total_backward_time: int = 0
    peak_tokens_per_second: float = 0.0
    rolling_average_tps: float = 0.0
    rolling_samples: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all passes together; 0 before the first."""
        time = self.total_forward_time + self.total_backward_time
        return (self.total_forward_tokens + self.total_backward_tokens) * NS / time if time else 0.0

    def record_forward(self, duration: int, tokens: int) -> None:
        self.total_forward_tokens += tokens
        self.total_forward_time += duration
        self._sample(duration, tokens)

    def record_backward(self, duration: int, tokens: int) -> None:
        self.total_backward_tokens += tokens
        self.total_backward_time += duration
        self._sample(duration, tokens)

    def _sample(self, duration: int, tokens: int) -> None:
        if not duration:
            return
        current = tokens * NS / duration
        self.peak_tokens_per_second = max(self.peak_tokens_per_second, current)
        if self.rolling_samples:
            self.rolling_average_tps = SMOOTHING * current + (1 - SMOOTHING) * self.rolling_average_tps
        else:
            self.rolling_average_tps = current
        self.rolling_samples += 1

    def merge(self, other: "ThroughputMetrics") -> None:
        """Totals add, the peak is the higher one, rolling averages are weighted by their samples."""
        self.total_forward_tokens += other.total_forward_tokens
        self.total_backward_tokens += other.total_backward_tokens
        self.total_forward_time += other.total_forward_time
        self.total_backward_time += other.total_backward_time
        self.peak_tokens_per_second = max(self.peak_tokens_per_second, other.peak_tokens_per_second)
        samples = self.rolling_samples + other.rolling_samples
        if samples:
            weighted = self.rolling_average_tps * self.rolling_samples + other.rolling_average_tps * other.rolling_samples
            self.rolling_average_tps = weighted / samples
        self.rolling_samples = samples

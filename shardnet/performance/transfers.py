"""`MemoryTransferMetrics`: parameters moved between CPU and GPU."""

from dataclasses import dataclass

from shardnet.performance.throughput import NS
from shardnet.telemetry import TransferDirection

REFERENCE_BYTES_PER_S = 1e9  # a transfer as fast as this, or faster, has efficiency 1


@dataclass(slots=True)
class MemoryTransferMetrics:
    """Transfers by direction: their number, bytes, and time in ns."""

    cpu_to_gpu_transfers: int = 0
    cpu_to_gpu_bytes: int = 0
    cpu_to_gpu_time: int = 0
    gpu_to_cpu_transfers: int = 0
    gpu_to_cpu_bytes: int = 0
    gpu_to_cpu_time: int = 0
    peak_bandwidth: float = 0.0  # bytes/s of the fastest single transfer
    transfer_efficiency: float = 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes/s over both directions; 0 before the first transfer."""
        time = self.cpu_to_gpu_time + self.gpu_to_cpu_time
        return (self.cpu_to_gpu_bytes + self.gpu_to_cpu_bytes) * NS / time if time else 0.0

    @property
    def bandwidth_gbps(self) -> float:
        """The same in GiB/s, under the name that other systems give it."""
        return self.bandwidth / 2**30

    def record(self, duration: int, bytes: int, direction: TransferDirection) -> None:
        if duration:
            self.peak_bandwidth = max(self.peak_bandwidth, bytes * NS / duration)
        match TransferDirection(direction):
            case TransferDirection.CPU_TO_GPU:
                self.cpu_to_gpu_transfers += 1
                self.cpu_to_gpu_bytes += bytes
                self.cpu_to_gpu_time += duration
            case TransferDirection.GPU_TO_CPU:
                self.gpu_to_cpu_transfers += 1
                self.gpu_to_cpu_bytes += bytes
                self.gpu_to_cpu_time += duration
        self._update()

    def merge(self, other: "MemoryTransferMetrics") -> None:
        self.cpu_to_gpu_transfers += other.cpu_to_gpu_transfers
        self.cpu_to_gpu_bytes += other.cpu_to_gpu_bytes
        self.cpu_to_gpu_time += other.cpu_to_gpu_time
        self.gpu_to_cpu_transfers += other.gpu_to_cpu_transfers
        self.gpu_to_cpu_bytes += other.gpu_to_cpu_bytes
        self.gpu_to_cpu_time += other.gpu_to_cpu_time
        self.peak_bandwidth = max(self.peak_bandwidth, other.peak_bandwidth)
        self._update()

    def _update(self) -> None:
        if self.cpu_to_gpu_transfers + self.gpu_to_cpu_transfers:  # before the first transfer it stays 1, also in a merge
            self.transfer_efficiency = min(1.0, self.bandwidth / REFERENCE_BYTES_PER_S)

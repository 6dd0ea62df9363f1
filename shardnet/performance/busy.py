"""`BusyTime`: for how long at least one of several overlapping activities was going on."""

MAX_OPEN = 256  # intervals that a later one may still overlap; beyond that the oldest are final


class BusyTime:
    """The length of the union of intervals, in ns. They must be added roughly in order of their ends, as collectives are."""

    def __init__(self) -> None:
        self._settled_ns = 0
        self._open: list[tuple[int, int]] = []  # disjoint, ascending

    @property
    def total_ns(self) -> int:
        return self._settled_ns + sum(end - start for start, end in self._open)

    def add(self, start_ns: int, end_ns: int) -> None:
        while self._open and self._open[-1][1] >= start_ns:
            start, end = self._open.pop()
            start_ns, end_ns = min(start_ns, start), max(end_ns, end)
        self._open.append((start_ns, end_ns))
        if len(self._open) > MAX_OPEN:
            start_ns, end_ns = self._open.pop(0)
            self._settled_ns += end_ns - start_ns

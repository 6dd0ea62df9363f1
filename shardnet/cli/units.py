"""Numbers with units, short enough for a table."""


def short_number(value: float) -> str:
    """`950`, `45.2k`, `1.3M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def short_bytes(count: int) -> str:
    """`950 B`, `45.2 KiB`, `1.3 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def short_duration(seconds: float) -> str:
    """`0:09`, `1:23`, `2:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_time(seconds: float) -> str:
    """`45.2 ms`, `1.23 s`, `1:23`."""
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else short_duration(seconds)

"""Numbers with units, short enough for a table. Any float has a text, since some come from other processes."""

import math


def short_number(value: float) -> str:
    """`0.3`, `950`, `45.2k`, `1.3M`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 9.95:  # from there on two digits are a whole number
        return f"{value:.2g}"
    for unit, digits in (("", 0), ("k", 1), ("M", 1)):
        if abs(round(value, digits)) < 1000:
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def short_loss(value: float) -> str:
    """`2.310`, `0.04500`, `2.662e-06`."""
    return f"{value:#.4g}".removesuffix(".")


def short_bytes(count: float) -> str:
    """`950 B`, `45.2 KiB`, `1.3 GiB`."""
    if not math.isfinite(count):
        return f"{count} B"
    value = float(count)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        if round(value, digits) < 1024:
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def short_duration(seconds: float) -> str:
    """`0:09`, `1:23`, `2:04:05`."""
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_time(seconds: float) -> str:
    """`45.2 ms`, `1.23 s`, `1:23`."""
    if round(1e3 * seconds, 1) < 1000:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if round(seconds, 2) < 60 else short_duration(seconds)

"""The machine that the numbers were measured on: they are worth little without it."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """`2 cores of Intel(R) Xeon(R) CPU @ 2.50GHz, Linux, Python 3.11.9, torch 2.9.0, grpcio 1.85.1`."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "grpcio"))
    return f"{_cores()} cores of {_processor()}, {platform.system()}, Python {platform.python_version()}, {packages}"


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

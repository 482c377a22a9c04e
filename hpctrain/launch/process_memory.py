"""The memory of this process, as the system counts it. Nothing here starts a process."""

from __future__ import annotations


def peak_resident_bytes() -> int:
    """The most memory that this process has held resident so far."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """The memory that this process holds resident now."""
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024

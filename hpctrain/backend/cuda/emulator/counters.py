"""Counts of what a device was asked for, so that tests can assert what a step does not do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DeviceCounters:
    """Counts since the device was made.

    Attributes:
        enqueued: by the kind of work, captured work included: names of kernels, "upload", "convolution forward", "graph", ...
        synchronisations: of the host, by ("event" or "stream <name>", the function that waits).
        uploaded_bytes: of all uploads.
        allocations, late_allocations: of device and pinned memory; those after `EmulatedDevice.seal`.
    """

    enqueued: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploaded_bytes: int = 0
    allocations: int = 0
    late_allocations: list[str] = field(default_factory=list)
    sealed: bool = False

    def allocated(self, size_bytes: int, where: str) -> None:
        """Count an allocation."""
        self.allocations += 1
        if self.sealed:
            self.late_allocations.append(f"{size_bytes} bytes at {where}")

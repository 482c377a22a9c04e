"""The account of a run's memory at its end: the most that each rank has held, on the processor and on its GPU."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from hpctrain.backend.choice import Backend
from hpctrain.backend.mirrors import PinnedBytes
from hpctrain.comm.base import Communicator
from hpctrain.launch.process_memory import peak_resident_bytes
from hpctrain.train.metrics_rest import Reporter


@dataclass(frozen=True)
class PeakMemory:
    """Bytes resident at most, of the rank that held most, and in the mean of the ranks.

    Shared memory that a rank has touched counts, and so do the pages of files that it has mapped and read.

    Attributes:
        rank: that held most, the first of several. device_bytes: in use of the GPU of a rank at the end, the most of any; None
            where ranks compute on the processor. pinned: for its GPU, of the rank that has most of it; None there, too.
    """

    most_bytes: int
    rank: int
    mean_bytes: float
    device_bytes: int | None = None
    pinned: PinnedBytes | None = None


def over_ranks(world: Communicator, backend: Backend) -> PeakMemory:
    """The peaks of all ranks so far. Collective over the world."""
    own = peak_resident_bytes(), backend.kernels.used_bytes(), backend.kernels.pinned_bytes()
    of_ranks = world.allgather_object(own)
    resident = [on_host for on_host, _, _ in of_ranks]
    on_devices = [on_device for _, on_device, _ in of_ranks if on_device is not None]
    pinned = max((of_rank for _, _, of_rank in of_ranks if of_rank is not None), key=lambda one: one.total, default=None)
    most = max(resident)
    return PeakMemory(most, resident.index(most), fmean(resident), max(on_devices, default=None), pinned)


def finish(world: Communicator, backend: Backend, reporter: Reporter, steps: tuple[int, int]) -> None:
    """Say and record the account; the last one stays where nothing was trained. Collective over the world.

    Args:
        steps: at which the job began, and ended.
    """
    if steps[0] != steps[1]:
        peak = over_ranks(world, backend)
        reporter.record("memory", facts(peak, steps[1]))
        reporter.say(line(peak, world.size))
        if peak.pinned is not None:
            reporter.say(pinned_line(peak.pinned))


def line(peak: PeakMemory, ranks: int) -> str:
    """The account in words."""
    of_rank = f" on rank {peak.rank}, {peak.mean_bytes / 1e6:,.0f} MB in the mean" if ranks > 1 else ""
    on_device = "" if peak.device_bytes is None else f"; {peak.device_bytes / 1e6:,.0f} MB of a GPU"
    return f"peak memory {peak.most_bytes / 1e6:,.0f} MB{of_rank}{on_device}"


def pinned_line(pinned: PinnedBytes) -> str:
    """The pinned memory in words."""
    messages, images = pinned.messages / 1e6, pinned.images / 1e6
    return f"pinned memory of a rank {pinned.total / 1e6:,.1f} MB: messages {messages:,.1f} MB, images {images:,.1f} MB"


def facts(peak: PeakMemory, step: int) -> dict[str, object]:
    """For the metrics. step: of the run's end."""
    values: dict[str, object] = {"step": step, "peak_bytes": peak.most_bytes, "rank": peak.rank, "mean_bytes": peak.mean_bytes}
    if peak.device_bytes is not None:
        values["device_bytes"] = peak.device_bytes
    if peak.pinned is not None:
        values |= {"pinned_message_bytes": peak.pinned.messages, "pinned_image_bytes": peak.pinned.images}
    return values

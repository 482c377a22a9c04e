"""Choice of the transport between devices (MPI, NCCL or host memory) and of the progress mode of messages.

If the configuration does not set them, the transport is chosen after a trial, and the progress mode after a measurement, at the
start of the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.backend import choice
from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm import progress_mode
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode
from hpctrain.comm.transports import Transport
from hpctrain.config.checks import progress_fault, transport_fault
from hpctrain.config.schema import Config
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.job.session import StartedRank
from hpctrain.launch.launcher import Launcher
from hpctrain.nn.network import Network

#: remark on transports that have only been run on emulated devices and on one GPU
_UNPROVED = "not yet run between GPUs"


def try_transport(config: Config | None, launcher: Launcher) -> str | None:
    """Test whether MPI can send from GPU memory, and return the outcome.

    None if the outcome does not matter or another rank runs the test. Starts a process; call it before MPI starts.
    """
    matters = config is not None and config.backend in ("cuda", "auto") and config.transport in ("auto", "mpi")
    if not matters or not launcher.starts_mpi or launcher.expected_size == 1 or launcher.local_rank:
        return None
    if choice.DEVICE_VARIABLE in os.environ or not choice.cupy_is_installed():
        return None
    from hpctrain.comm.device_probe import trial  # here: only nodes that may have a GPU need it

    return trial()


def choose_transport(
    config: Config, world: Communicator, arithmetic: Arithmetic, found: str | None
) -> tuple[Transport, tuple[str, ...]]:
    """Return the transport, and the line of the run's log with the reason; no line if no messages are sent. Collective.

    Args:
        found: result of `try_transport` on this rank.

    Raises:
        ConfigError: a transport between GPUs is configured without GPUs; on every rank.
        BackendError: MPI, NCCL or the GPUs do not support the configured transport; on every rank.
    """
    messages = arithmetic.messages()
    if messages is None:
        if config.transport != "auto":
            raise ConfigError(transport_fault(config.transport))
        return "staged", ()
    if world.size == 1:
        return "staged", ()
    from hpctrain.comm.device_probe import AWARE, UNTRIED, last_line

    outcomes = [outcome for outcome in world.allgather_object(found) if outcome not in (None, UNTRIED)]
    refused = next((outcome for outcome in outcomes if outcome != AWARE), None)
    reason = None if refused is None else last_line(refused).partition(": ")[2] or last_line(refused)
    if config.transport == "nccl":
        from hpctrain.comm import transports

        fault = transports.group_fault(world, messages)
        if fault is not None:
            raise BackendError(f"transport is nccl, but {fault}; set transport to auto or staged.")
        return "nccl", (f"transport nccl: as configured ({_UNPROVED})",)
    if config.transport == "mpi":
        if reason is not None:
            raise BackendError(f"transport is mpi, but MPI cannot send from GPU memory ({reason}); set transport to staged.")
        tested = "as configured, and a trial has shown that MPI can send from GPU memory" if outcomes else "as configured"
        return "mpi", (f"transport mpi: {tested} ({_UNPROVED})",)
    if config.transport == "auto" and outcomes and reason is None:
        return "mpi", (f"transport mpi: a trial has shown that MPI can send from GPU memory ({_UNPROVED})",)
    because = "" if reason is None else f"; MPI cannot send from GPU memory: {reason.rstrip('.')}"
    return "staged", (f"transport staged: messages pass through host memory{because}",)


_SHORTEST_OPERATOR_SECONDS = 0.5e-3
_LONGEST_OPERATOR_SECONDS = 20e-3
# An exchange of all gradients that takes less is negligible in a step, and too short to be measured.
_WORTH_SECONDS = 5e-3
_FLOPS_PER_CORE = 4e10  # of a core, for float32 matrix products; a rough value suffices


@dataclass(frozen=True)
class ChosenProgress:
    """Progress mode, its reason, and the measurement, if any.

    Attributes:
        mode: chosen mode.
        reason: why the mode was chosen.
        matters: whether there are messages to hide; otherwise the choice need not be printed.
        measurement: measurement on which the choice is based; None if none was needed.
        seconds: duration of the measurement.
    """

    mode: ProgressMode
    reason: str
    matters: bool = True
    measurement: OverlapMeasurement | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"progress {self.mode}: {self.mode.in_words} ({self.reason})"

    def facts(self) -> dict[str, object]:
        """Return the mode, its reason and its measurement as JSON-compatible data for the run directory."""
        facts: dict[str, object] = {"mode": str(self.mode), "reason": self.reason}
        if self.measurement is not None:
            modes = tuple(self.measurement.by_round)
            facts |= {
                "wire_seconds": self.measurement.wire_seconds,
                "compute_seconds": self.measurement.compute_seconds,
                "operator_seconds": self.measurement.operator_seconds,
                "message_bytes": self.measurement.message_bytes,
                "rounds": len(self.measurement.by_round[ProgressMode.TEST]),
                "together_seconds": {str(mode): value for mode, value in self.measurement.together_seconds.items()},
                "hidden": {str(mode): self.measurement.hidden(mode) for mode in modes},
                "ratio_to_test": {str(mode): self.measurement.ratio(mode) for mode in modes},
                "ratio_to_test_limit": {str(mode): self.measurement.ratio_limit(mode) for mode in modes},
                "measurement_seconds": self.seconds,
            }
        return facts


def set_progress(rank: StartedRank, network: Network, wanted: str, samples: int) -> ChosenProgress:
    """Choose the progress mode and apply it to the engine. Collective over the world; call after the averagers are made.

    Args:
        wanted: name of a mode, or "auto".
        samples: number of samples in a pass of this rank.

    Raises:
        ConfigError: the mode has a thread, but MPI does not allow calls from a second thread.
    """
    if rank.world.size > 1 and not network.kernels.arithmetic.on_host:
        chosen = _with_device_kernels(wanted)
    elif wanted == "auto":
        chosen = _measured(rank, network, samples)
    else:
        mode = ProgressMode(wanted)
        if mode.has_thread and not rank.threads_may_communicate:
            raise ConfigError(
                f'progress is {mode}, which needs the MPI thread level "serialized" or "multiple", but MPI has started at '
                f"{rank.mpi_library.rpartition(', ')[2]}; set progress to test, or use an MPI library with that level."
            )
        chosen = ChosenProgress(mode, "as configured", matters=rank.world.size > 1)
        if mode is ProgressMode.POSTING and rank.world.size == 1:
            chosen = ChosenProgress(ProgressMode.TEST, "one rank: there are no messages that a thread could post", matters=False)
    progress_mode.apply(rank.progress, chosen.mode)
    return chosen


def _with_device_kernels(wanted: str) -> ChosenProgress:
    """Return the mode for kernels on a device: they leave the core to messages, and only one thread may enqueue work.

    Raises:
        ConfigError: the configured mode has a thread.
    """
    if wanted in (ProgressMode.THREAD, ProgressMode.POSTING):
        raise ConfigError(progress_fault(wanted))
    if wanted == "auto":
        return ChosenProgress(ProgressMode.TEST, "kernels run on a device, which leaves the core to messages", matters=False)
    return ChosenProgress(ProgressMode(wanted), "as configured", matters=True)


def _measured(rank: StartedRank, network: Network, samples: int) -> ChosenProgress:
    """Return `test`, or another mode if a measurement shows it to be clearly faster. Collective over the world."""
    if rank.world.size == 1:
        return ChosenProgress(ProgressMode.TEST, "one rank: there are no messages", matters=False)
    begin = time.perf_counter()
    messages = rank.groups.messages
    first_group = int(messages.broadcast_object(rank.world.rank)) == 0
    shared, measurement = False, None
    if first_group and messages.size > 1:
        shared, measurement = True, _measure(rank, network, samples)
    shared, measurement = rank.world.broadcast_object((shared, measurement))
    if not shared:
        return ChosenProgress(ProgressMode.TEST, "no ranks share the batch: no gradients are exchanged", matters=False)
    if measurement is None:
        reason = f"exchanging all gradients takes less than {_WORTH_SECONDS * 1e3:g} ms: there is nothing to hide"
        return ChosenProgress(ProgressMode.TEST, reason, matters=False)
    return from_measurement(measurement, time.perf_counter() - begin)


def from_measurement(measurement: OverlapMeasurement, seconds: float) -> ChosenProgress:
    """Choose the mode from a measurement; return it with the reason in words."""
    mode = progress_mode.choose(measurement)
    if mode is ProgressMode.TEST:
        reason = "the usual mode; no other was clearly faster here"
    else:
        reason = f"measured: {1 - measurement.ratio(mode):.0%} less time than the usual mode"
    return ChosenProgress(mode, reason, measurement=measurement, seconds=seconds)


def _measure(rank: StartedRank, network: Network, samples: int) -> OverlapMeasurement | None:
    """Measure the modes; None if an exchange of all gradients is too short to be measured.

    Collective over the ranks that share rank 0's batch.
    """
    messages = rank.groups.messages
    gradient_bytes = int(messages.broadcast_object(sum(group.grad.nbytes for group in network.groups.values())))
    return progress_mode.measure(
        messages,
        rank.progress,
        _allowed(rank),
        operator_seconds=_operator_seconds(network, samples, rank.threads.threads),
        most_bytes=gradient_bytes,
        worth_seconds=_WORTH_SECONDS,
    )


def _allowed(rank: StartedRank) -> Sequence[ProgressMode]:
    modes = (ProgressMode.TEST, ProgressMode.NONE, ProgressMode.THREAD)
    return modes if rank.threads_may_communicate else modes[:2]


def _operator_seconds(network: Network, samples: int, threads: int) -> float:
    """Return the estimated time of a typical operator: the mean, weighted by time, within fixed bounds."""
    graph = network.graph(samples)
    specs = [node.spec.flops(*(graph.tensors[index].plain() for index in node.inputs)) for node in graph.nodes if node.inputs]
    total = sum(specs)
    if total == 0:
        return _SHORTEST_OPERATOR_SECONDS
    typical = sum(flops * flops for flops in specs) / total
    seconds = typical / (_FLOPS_PER_CORE * threads)
    return min(max(seconds, _SHORTEST_OPERATOR_SECONDS), _LONGEST_OPERATOR_SECONDS)

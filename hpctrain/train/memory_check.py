"""The memory of a training: what a step needs, the batch that fits where that is too much, and the plan where it ran out."""

from __future__ import annotations

import contextlib
import weakref

from hpctrain.core.errors import BackendError
from hpctrain.nn.network import Network

# The latest network of this process that was checked, with the samples of a pass.
_CHECKED: list[tuple[weakref.ref[Network], int]] = []


def check_memory(network: Network, batch: int, micro_batches: int) -> None:
    """Nothing, where a step of `batch` samples in so many micro-batches fits into the device's memory, or where none is limited.

    Parameters and gradients are allocated already; the optimiser's state, of the size of the parameters, is not.

    Raises:
        BackendError: it does not fit; the sentence says which batch does.
    """
    samples = -(-batch // micro_batches)
    _CHECKED[:] = [(weakref.ref(network), samples)]
    free = network.kernels.free_bytes()
    if free is None:
        return
    state = sum(group.data.nbytes for group in network.groups.values())
    arena = network.arena_bytes(samples, training=True)
    if arena + state <= free:
        return
    fitting = _fitting(network, samples, arena, free - state)
    if fitting:
        remedy = f"{fitting} fit: set micro_batches to {-(-batch // fitting)}, or batch to {fitting}"
    else:
        remedy = "not even one fits: take a smaller network or images, or a GPU with more memory"
    raise BackendError(
        f"A pass over {samples} samples needs {(arena + state) / 1e9:.2f} GB of the device's memory, "
        f"of which {free / 1e9:.2f} GB are free; {remedy}."
    )


def planned() -> str | None:
    """The needs, in words, of the network that this process trains, by its plan; None where there is none, or no plan yet."""
    network = _CHECKED[-1][0]() if _CHECKED else None
    if network is None:
        return None
    samples = _CHECKED[-1][1]
    state = sum(group.data.nbytes for group in network.groups.values())
    with contextlib.suppress(Exception):  # there is little memory left, and nothing may hide the first error
        arena = network.arena_bytes(samples, training=True)
        return (
            f"the plan has {arena / 1e9:.3f} GB for a pass over {samples} samples and {3 * state / 1e9:.3f} GB for parameters, "
            "gradients and the optimiser's state"
        )
    return None


def _fitting(network: Network, samples: int, arena: int, available: int) -> int:
    """The largest number of samples that is found to fit, guessed from the bytes of larger ones; 0 where there is none."""
    while samples > 1 and arena > available:
        samples = max(1, min(samples - 1, samples * max(available, 0) // arena))
        arena = network.arena_bytes(samples, training=True)
    return samples if arena <= available else 0

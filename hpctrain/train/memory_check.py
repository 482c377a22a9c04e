"""The memory of a device before a training: what a step needs, and the batch that fits where it is too much."""

from __future__ import annotations

from hpctrain.errors import BackendError
from hpctrain.nn.network import Network


def check_memory(network: Network, batch: int, micro_batches: int) -> None:
    """Nothing, where a step of `batch` samples in so many micro-batches fits into the device's memory, or where none is limited.

    Parameters and gradients are allocated already; the optimiser's state, of the size of the parameters, is not.

    Raises:
        BackendError: it does not fit; the sentence says which batch does.
    """
    free = network.kernels.free_bytes()
    if free is None:
        return
    state = sum(group.data.nbytes for group in network.groups.values())
    samples = -(-batch // micro_batches)
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


def _fitting(network: Network, samples: int, arena: int, available: int) -> int:
    """The largest number of samples that is found to fit, guessed from the bytes of larger ones; 0 where there is none."""
    while samples > 1 and arena > available:
        samples = max(1, min(samples - 1, samples * max(available, 0) // arena))
        arena = network.arena_bytes(samples, training=True)
    return samples if arena <= available else 0

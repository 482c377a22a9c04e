"""A training that does not fit into a device's memory is refused with the batch that does."""

from __future__ import annotations

import re

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import BackendError
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.train.memory_check import check_memory, planned


class LimitedKernelSet(NumpyKernelSet):
    """Has so much memory left."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def _network(free: int) -> Network:
    layers = {"flatten": Flatten(), "fc1": Linear(192, 50), "relu": ReLU(), "fc2": Linear(50, 3)}
    return Network(Sequential(layers), (8, 8, 3), LimitedKernelSet(free))


def _state() -> int:
    return sum(group.data.nbytes for group in _network(0).groups.values())


@pytest.mark.parametrize("fits", [1, 2, 9, 31])
def test_the_batch_that_is_told_fits_and_is_nearly_the_largest(fits: int) -> None:
    free = _network(0).arena_bytes(fits, training=True) + _state()
    network = _network(free)
    check_memory(network, fits, 1)
    with pytest.raises(BackendError) as caught:
        check_memory(network, 256, 2)
    match = re.search(r"over 128 samples needs .* (\d+) fit: set micro_batches to (\d+), or batch to (\d+)\.$", str(caught.value))
    assert match is not None
    told, micro_batches, batch = map(int, match.groups())
    assert fits - 1 <= told == batch <= fits or fits == told == 1
    check_memory(network, 256, micro_batches)
    check_memory(network, batch, 1)


def test_no_batch_at_all() -> None:
    network = _network(_network(0).arena_bytes(1, training=True) + _state() - 1)
    with pytest.raises(BackendError, match="not even one fits: take a smaller network"):
        check_memory(network, 8, 1)


def test_memory_of_the_host_is_not_counted() -> None:
    check_memory(Network(Flatten(), (1, 1, 3), NumpyKernelSet()), 1 << 40, 1)


def test_the_plan_is_told_of_the_network_that_was_checked_last() -> None:
    network = _network(1 << 40)
    check_memory(network, 12, 3)
    sentence = planned()
    assert sentence is not None
    assert f"the plan has {network.arena_bytes(4, training=True) / 1e9:.3f} GB for a pass over 4 samples" in sentence
    assert f"{3 * _state() / 1e9:.3f} GB for parameters" in sentence
    del network
    assert planned() is None

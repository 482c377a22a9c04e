"""Products of exchanged inputs and errors: which there are, what they do, and how they are timed."""

from __future__ import annotations

from itertools import count

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.network import Network
from hpctrain.planner.factor_products import FactorProduct, products_of, time_product


def test_every_linear_layer_has_a_product_of_its_weights_size() -> None:
    network = Network(catalogue.build("vgg11", {"width": 0.0625}), (32, 32, 3), NumpyKernelSet())
    plan = compile_graph(network.graph(2), network.kernels, training=True)
    products = products_of(plan, 8)
    weights = [spec.shape for name, spec in network.parameter_specs.items() if len(spec.shape) == 2]
    assert [(product.inputs, product.outputs) for product in products] == weights
    assert {product.samples for product in products} == {8}


def test_operations_are_those_of_a_product_and_bytes_those_of_its_arrays() -> None:
    product = FactorProduct(3, 5, 7)
    assert product.flops == 2 * 3 * 5 * 7
    assert product.bytes(4) == 4 * (3 * 5 + 3 * 7 + 5 * 7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_time_is_of_one_product_after_all_were_waited_for(dtype: str) -> None:
    ticks, calls = count(), []
    seconds = time_product(FactorProduct(2, 3, 4), dtype, 5, lambda: float(next(ticks)), lambda: calls.append(1))
    assert (seconds, len(calls), next(ticks)) == (1.0, 7, 14)

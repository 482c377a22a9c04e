"""The kernel set under test, made once: its engine and jitted kernels are shared."""

from __future__ import annotations

import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available


@pytest.fixture(scope="session")
def onednn() -> OnednnKernelSet:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    return OnednnKernelSet()


@pytest.fixture(scope="session")
def reference() -> NumpyKernelSet:
    return NumpyKernelSet()

import inspect

from hpctrain.backend.arithmetic import Arithmetic, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet


def test_the_sets_of_the_cpu_have_the_arithmetic_of_the_host() -> None:
    for kernels in (NumpyKernelSet, OnednnKernelSet):
        assert kernels.arithmetic.on_host
        assert (kernels.alignment_bytes, kernels.shadow_dtype) == (64, None)
    assert CudaKernelSet.alignment_bytes == 256


def test_services_have_the_same_signatures() -> None:
    for name, method in inspect.getmembers(Arithmetic, inspect.isfunction):
        assert inspect.signature(getattr(HostArithmetic, name)).parameters.keys() == inspect.signature(method).parameters.keys()


def test_a_run_lies_at_the_same_place_in_the_state_by_default() -> None:
    assert UpdateRun(3, 5, 1.0, 0.0).offset == 0

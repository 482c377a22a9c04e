"""Runs on devices: the choice of a transport on all ranks, and a faulty job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.assembly.faults import device_faults
from hpctrain.backend import choice
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.comm import device_probe
from hpctrain.comm.device_probe import AWARE, UNAWARE, UNTRIED
from hpctrain.config.schema import Config
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.launch.launcher import Launcher
from hpctrain.run.messages import choose_transport, try_transport
from hpctrain_testing.faults import DEADLINE_SECONDS, FAULTS, findings, is_named, prepare, run_fault
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.emulated import EmulatedDeviceFactory

STAGED = "transport staged: messages pass through host memory"


def _config(**keys: Any) -> Config:
    return Config.model_validate(
        {"model": "small", "data": {"train": "t.h5"}, "batch": 8, "epochs": 1, "optimizer": {"name": "sgd", "lr": 0.1}}
        | {"schedule": "constant", "output": "runs", "backend": "cuda", **keys}
    )


class _Messages:
    def __init__(self, identity: str, fault: str | None = None) -> None:
        self.identity, self._fault = identity, fault

    def group_fault(self) -> str | None:
        return self._fault


class _Arithmetic:
    def __init__(self, messages: _Messages) -> None:
        self._messages = messages

    def messages(self) -> _Messages:
        return self._messages


def _choices(wanted: str, found: Sequence[str | None], identities: Sequence[str] = "abc", fault: str | None = None) -> list[Any]:
    """The choice of each rank: the way and its line, or the error."""

    def program(comm: ThreadCommunicator) -> Any:
        arithmetic: Any = _Arithmetic(_Messages(identities[comm.rank], fault if comm.rank else None))
        try:
            return choose_transport(_config(transport=wanted), comm, arithmetic, found[comm.rank])
        except BackendError as error:
            return str(error)

    return run_virtual(len(found), program)


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ("auto", (None, None), ("staged", (STAGED,))),
        ("auto", (UNTRIED, None), ("staged", (STAGED,))),
        (
            "auto",
            (AWARE, None, AWARE),
            ("mpi", ("transport mpi: a trial has shown that MPI can send from GPU memory (not yet run between GPUs)",)),
        ),
        (
            "auto",
            (AWARE, f"{UNAWARE}: Segmentation fault."),
            ("staged", (f"{STAGED}; MPI cannot send from GPU memory: Segmentation fault",)),
        ),
        (
            "auto",
            ("abort\nGTL is not linked", None),
            ("staged", (f"{STAGED}; MPI cannot send from GPU memory: GTL is not linked",)),
        ),
        ("staged", (AWARE, AWARE), ("staged", (STAGED,))),
        ("mpi", (None, None), ("mpi", ("transport mpi: as configured (not yet run between GPUs)",))),
        (
            "mpi",
            (AWARE, None),
            (
                "mpi",
                (
                    "transport mpi: as configured, and a trial has shown that MPI can send from GPU memory "
                    "(not yet run between GPUs)",
                ),
            ),
        ),
        (
            "mpi",
            (None, f"{UNAWARE}: no driver"),
            "transport is mpi, but MPI cannot send from GPU memory (no driver); set transport to staged.",
        ),
        ("nccl", (None, None, None), ("nccl", ("transport nccl: as configured (not yet run between GPUs)",))),
    ],
)
def test_the_choice_is_that_of_all_ranks(wanted: str, found: Sequence[str | None], expected: Any) -> None:
    assert _choices(wanted, found) == [expected] * len(found)


def test_nccl_needs_a_gpu_for_each_rank_and_a_library() -> None:
    shared = (
        "transport is nccl, but ranks 0 and 2 share a GPU, but NCCL allows one rank per GPU; set transport to auto or staged."
    )
    assert _choices("nccl", (None,) * 3, "aba") == [shared] * 3
    missing = "transport is nccl, but on rank 1 CuPy finds no NCCL; set transport to auto or staged."
    assert _choices("nccl", (None,) * 3, fault="CuPy finds no NCCL") == [missing] * 3


def test_where_nothing_travels_there_is_nothing_to_say() -> None:
    assert _choices("nccl", (None,)) == [("staged", ())]


def test_on_the_host_there_is_nothing_to_choose() -> None:
    def program(comm: ThreadCommunicator) -> None:
        assert choose_transport(_config(backend="auto"), comm, HostArithmetic(), None) == ("staged", ())
        with pytest.raises(
            ConfigError, match=r'^transport is nccl, which applies to GPUs only; set it to auto, or backend to "cuda"\.$'
        ):
            choose_transport(_config(backend="auto", transport="nccl"), comm, HostArithmetic(), None)

    run_virtual(2, program)


def test_a_trial_is_made_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "trial", lambda: AWARE)
    monkeypatch.setattr(choice, "cupy_is_installed", lambda: True)
    monkeypatch.delenv(choice.DEVICE_VARIABLE, raising=False)
    launcher = Launcher("Slurm srun", 4, 0, 2, 0)
    assert (try_transport(_config(), launcher), try_transport(_config(backend="auto", transport="mpi"), launcher)) == (
        AWARE,
        AWARE,
    )
    for config in (None, _config(backend="onednn"), _config(transport="staged"), _config(transport="nccl")):
        assert try_transport(config, launcher) is None
    for other in (Launcher("none"), Launcher("Slurm srun", 1, 0, 1, 0), Launcher("Slurm srun", 4, 1, 2, 1)):
        assert try_transport(_config(), other) is None
    monkeypatch.setenv(choice.DEVICE_VARIABLE, "hpctrain_testing.emulator")
    assert try_transport(_config(), launcher) is None
    monkeypatch.delenv(choice.DEVICE_VARIABLE)
    monkeypatch.setattr(choice, "cupy_is_installed", lambda: False)
    assert try_transport(_config(), launcher) is None


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"backend": "onednn", "transport": "staged"}, "transport is staged, which applies to GPUs only; set it to auto"),
        ({"transport": "nccl", "averager": "sparse"}, "transport is nccl, but averager sparse chooses the elements to send"),
    ],
)
def test_refusals(keys: dict[str, Any], sentence: str) -> None:
    (fault,) = device_faults(_config(**keys))
    assert fault.path == ("transport",)
    assert str(fault).startswith(sentence)
    assert list(device_faults(_config(**{**keys, "transport": "auto"}))) == []


#: one of each kind; `benchmarks/faults.py --device` runs all
NAMES = (
    *("a skipped step", "operations in another order", "a wrong count", "a wrong dtype", "an exception", "os._exit(0)"),
    *("SIGKILL", "SIGSTOP", "a rank that is too slow", "a number that is not finite", "a flipped bit of a parameter"),
    "a flipped bit of the optimizer's state, which its owner holds",
)
_START_SECONDS = 40.0  # on a loaded machine


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_faulty_job_ends_and_the_rank_is_named(tmp_path: Path, emulated_device: EmulatedDeviceFactory, name: str) -> None:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    prepare(tmp_path)
    outcome = run_fault(fault, tmp_path, timeout_seconds=90, device="hpctrain_testing.emulator:7")
    assert outcome.code != 0, outcome.output
    assert outcome.seconds < DEADLINE_SECONDS + _START_SECONDS
    assert "kernels cuda on emulated" in outcome.output
    assert is_named(fault, outcome, findings(tmp_path)), outcome.output

"""Blocking averaging on virtual ranks gives what one rank gives, whatever the scheduler does."""

from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.comm.link import LinkModel
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import averaged

INPUTS, HIDDEN, OUTPUTS, STEPS = 5, 7, 3, 20
SIZES = (9, 9, 4)  # samples of the steps in turn; the last is shorter than 7 ranks

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Sgd(),
    "momentum": lambda: Sgd(momentum=0.9),
    "nesterov": lambda: Sgd(momentum=0.9, nesterov=True, weight_decay=1e-2),
    "decay of all": lambda: Sgd(momentum=0.9, weight_decay=1e-2, decay_exclude="none"),
    "clipping": lambda: Sgd(momentum=0.5, clip_norm=0.05),
    "lars": lambda: Lars(weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5),
}


def make_group(dtype: str) -> FlatGroup:
    """Two layers and a parameter that nobody uses, with the same values wherever it is made."""
    random = np.random.default_rng(1)

    def spec(*shape: int) -> ParameterSpec:
        return ParameterSpec(shape, lambda generator, shape: generator.standard_normal(shape), decay=len(shape) > 1)

    shapes = {"a.weight": (INPUTS, HIDDEN), "a.bias": (HIDDEN,), "b.weight": (HIDDEN, OUTPUTS), "b.bias": (OUTPUTS,), "c": (1,)}
    group = FlatGroup({name: spec(*shape) for name, shape in shapes.items()}, dtype)
    for parameter in group.parameters.values():
        parameter.data[...] = 0.5 * parameter.spec.initialise(random, parameter.spec.shape)
    return group


def my_samples(step: int, rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray, int]:
    """This rank's share of a step's samples, maybe none, and the global count."""
    count = SIZES[step % len(SIZES)]
    random = np.random.default_rng(100 + step)
    x, y = random.standard_normal((count, INPUTS)), random.standard_normal((count, OUTPUTS))
    share = slice(rank * count // ranks, (rank + 1) * count // ranks)
    return x[share], y[share], count


def one_step(group: FlatGroup, averager: GradientAverager, step: int, rank: int, ranks: int) -> None:
    """y = tanh(x A + a) B + b, half the squared error over the global count, backward in the averager's order of calls."""
    p = group.parameters
    x, target, count = my_samples(step, rank, ranks)
    averager.begin_step(0.1)
    averager.before_forward([p["a.weight"], p["a.bias"]])
    hidden = np.tanh(x @ p["a.weight"].data + p["a.bias"].data)
    averager.before_forward([p["b.weight"], p["b.bias"]])
    dy = (hidden @ p["b.weight"].data + p["b.bias"].data - target) / count
    p["c"].grad[...] = 0.0
    averager.grad_ready(p["c"])
    averager.data_free(p["c"])
    p["b.weight"].grad[...], p["b.bias"].grad[...] = hidden.T @ dy, dy.sum(0)
    averager.grad_ready(p["b.bias"])
    averager.grad_ready(p["b.weight"])
    d_hidden = (dy @ p["b.weight"].data.T) * (1 - hidden**2)
    averager.data_free(p["b.weight"])
    p["a.weight"].grad[...], p["a.bias"].grad[...] = x.T @ d_hidden, d_hidden.sum(0)
    averager.grad_ready(p["a.bias"])
    averager.grad_ready(p["a.weight"])
    averager.end_backward()


def train(ranks: int, optimizer: str, seed: int | None, dtype: str = "float64") -> list[np.ndarray]:
    """Every rank's parameters after all steps."""

    def program(comm: ThreadCommunicator) -> np.ndarray:
        group = make_group(dtype)
        averager = averaged(Blocking, group, OPTIMIZERS[optimizer](), comm, virtual_engine(comm))
        for step in range(STEPS):
            one_step(group, averager, step, comm.rank, ranks)
        averager.drain()
        return group.data

    return run_virtual(ranks, program, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_many_ranks_are_one_rank(optimizer: str, ranks: int) -> None:
    (alone,) = train(1, optimizer, None)
    assert np.abs(alone - make_group("float64").data).max() > 0.01
    for seed in (None, 0, 1, 2):
        results = train(ranks, optimizer, seed)
        assert all(data.tobytes() == results[0].tobytes() for data in results)
        assert np.linalg.norm(results[0] - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_float32_is_near_float64_and_the_same_for_every_schedule(ranks: int) -> None:
    (exact,) = train(1, "momentum", None)
    runs = [train(ranks, "momentum", seed, "float32") for seed in (None, 0, 1, 2)]
    assert len({data.tobytes() for run in runs for data in run}) == 1
    assert np.linalg.norm(runs[0][0] - exact) <= 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_step_hands_over_one_allreduce_and_waits_for_all_of_it(ranks: int) -> None:
    """2 (P-1)/P n bytes per rank in the mean, and nothing of the transfer is hidden."""
    link = LinkModel(alpha_seconds=1e-5, beta_seconds_per_byte=1e-8)

    def program(comm: ThreadCommunicator) -> tuple[Counters, float]:
        counters, engine, group = Counters(), virtual_engine(comm), make_group("float64")
        averager = averaged(Blocking, group, OPTIMIZERS["sgd"](), CountingCommunicator(comm, counters), engine)
        for step in range(3):
            one_step(group, averager, step, comm.rank, ranks)
        return counters, engine.waited_seconds

    n = make_group("float64").size
    results = run_virtual(ranks, program, link=link)
    assert sum(counters.total().exchanged_bytes for counters, _ in results) == 3 * 2 * (ranks - 1) * 8 * n
    for counters, waited_seconds in results:
        assert list(counters) == [("world", "iallreduce")]
        assert counters.total().operations == 3
        assert waited_seconds == pytest.approx(3 * link.allreduce_seconds(8 * n, ranks))

"""A checkpoint of any number of ranks is continued by any other: whole state out, own parts in."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager, for_holders
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import STRATEGIES, make, make_group, one_step, run_steps

Stored = tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]


def _save(averager: GradientAverager) -> Stored:
    state = {
        name: {key: values.copy() for key, values in averager.full_state(parameter).items()}
        for name, parameter in averager.group.parameters.items()
    }
    return averager.group.data.copy(), state


def _restore(averager: GradientAverager, stored: Stored) -> None:
    averager.group.data[...] = stored[0]
    for name, parameter in averager.group.parameters.items():
        state = dict(stored[1][name])
        if averager.pending in state:
            state[averager.pending] = for_holders(state[averager.pending], averager.holders)
        averager.load_state(parameter, state)


def _train(strategy: str, ranks: int, steps: range, stored: Stored | None = None) -> list[Stored]:
    def program(comm: ThreadCommunicator) -> Stored:
        averager = make(strategy, "lars, clipping", comm, virtual_engine(comm))
        if stored is not None:
            _restore(averager, stored)
        run_steps(averager, len(steps), steps.start)
        return _save(averager)

    return run_virtual(ranks, program, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*STRATEGIES, "blocking"])
def test_training_goes_on_with_other_ranks(strategy: str) -> None:
    (through,) = _train("blocking", 1, range(9))
    stored = _train(strategy, 3, range(4))[0]
    for after in (1, 2, 5):
        for other in ("blocking", strategy):
            for data, state in _train(other, after, range(4, 9), stored):
                assert np.linalg.norm(data - through[0]) <= 1e-10 * np.linalg.norm(through[0])
                for name, values in state.items():
                    np.testing.assert_allclose(values["momentum"], through[1][name]["momentum"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_gets_the_same_whole_state(strategy: str) -> None:
    results = _train(strategy, 3, range(3))
    for name, parameter in make_group().parameters.items():
        first = results[0][1][name]["momentum"]
        assert first.shape == (parameter.size,)
        for _, state in results[1:]:
            np.testing.assert_array_equal(state[name]["momentum"], first)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("strategy", ["sharded", "priority"])
def test_owners_share_all_elements_out(strategy: str, ranks: int) -> None:
    def program(comm: ThreadCommunicator) -> list[tuple[int, int]]:
        averager = make(strategy, "momentum", comm, virtual_engine(comm))
        return [(segment.start, segment.stop) for segment in averager.owned()]

    covered = sorted(span for spans in run_virtual(ranks, program) for span in spans)
    assert [i for begin, end in covered for i in range(begin, end)] == list(range(make_group().size))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_does_not_grow_with_steps(strategy: str) -> None:
    """Tickets and events of old steps are let go."""
    import gc

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        averager = make(strategy, "clipping", comm, virtual_engine(comm))
        counts = []
        for step in range(30):
            one_step(averager, step)
            if step in (11, 29):  # the same samples of a step
                averager.drain()
                gc.collect()
                counts.append(len(gc.get_objects()))
        return counts[0], counts[1]

    ((before, after),) = run_virtual(1, program)
    assert after <= before + 20

"""A training with shards has the same bits on any number of ranks, with any strategy and any size of messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.core.errors import ConfigError
from hpctrain.data.loader import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.optim.optimizers import Adamw, Lamb, Lars, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, distance, made_up, replica_of, train

#: a batch that no number of ranks divides, and a last one of an epoch with fewer samples than shards
PLAIN = Task(partial(nets.plain, dropout=0.3), NumpyKernelSet(), partial(Sgd, momentum=0.9), dtype="float32", batch=11, steps=6)
RESIDUAL = replace(PLAIN, model=partial(nets.residual, synchronised=False))
#: a layer of many terms of a norm, and others of a few; in float32 rounding would hide the last bits of norms
WIDE = replace(PLAIN, model=partial(nets.plain, hidden=300), steps=4, dtype="float64")
TASKS = {
    "plain": PLAIN,
    "residual": RESIDUAL,
    "residual adamw": replace(RESIDUAL, optimizer=partial(Adamw, beta2=0.9)),
    "wide lars": replace(WIDE, optimizer=partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1)),
    "wide lars clipping": replace(WIDE, optimizer=partial(Lars, momentum=0.9, trust_coefficient=0.1, clip_norm=0.5)),
    "wide lamb": replace(WIDE, optimizer=partial(Lamb, weight_decay=1e-2)),
    "wide clipping": replace(WIDE, optimizer=partial(Sgd, momentum=0.9, clip_norm=0.3)),
    "plain onednn": replace(PLAIN, kernels=OnednnKernelSet()),
    "residual onednn": replace(RESIDUAL, kernels=OnednnKernelSet()),
}
STRATEGIES: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sharded": (Sharded, {}),
    "sharded 64": (Sharded, {"bucket_bytes": 64}),
    "sharded 3000": (Sharded, {"bucket_bytes": 3000}),
    "sharded one by one": (Sharded, {"bucket_bytes": 64, "window": 1, "replan": False}),
    "bucketed": (Bucketed, {}),
    "bucketed 64": (Bucketed, {"bucket_bytes": 64}),
    "bucketed 3000": (Bucketed, {"bucket_bytes": 3000}),
    "overlap": (Overlap, {}),
    "priority": (Priority, {"slice_parameters": 100}),
    "blocking": (Blocking, {}),
}


def _sha256(tensors: Mapping[str, np.ndarray]) -> str:
    """Of all tensors of a checkpoint, by name."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha.hexdigest()


def _steps(
    task: Task, comm: ThreadCommunicator, strategy: str, steps: range, content: CheckpointContent | None = None
) -> tuple[CheckpointContent, list[float]]:
    """Return the state after some steps of a training, and the loss of each."""
    kind, options = STRATEGIES[strategy]
    replica = replica_of(task, comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options)
    if content is not None:
        assert replica.load(content).global_step == steps.start
    losses = []
    for batch in islice(batches(task, replica.groups.position, comm.size), steps.start, steps.stop):
        replica.step(batch, task.lr)
        sums = replica.settle()
        assert sums is not None
        losses.append(sums.loss)
    replica.drain()
    return replica.state(Position(global_step=replica.global_step), {}), losses


def _on_ranks(name: str, shards: int, ranks: int, strategy: str) -> tuple[str, list[float]]:
    """SHA-256 of parameters, optimiser state and running statistics, and all losses; of all ranks, which agree."""
    task = replace(TASKS[name], exact_shards=shards)
    results = run_virtual(ranks, lambda comm: _steps(task, comm, strategy, range(task.steps)), seed=ranks)
    digests = [(_sha256(dict(content.tensors)), losses) for content, losses in results]
    assert all(digest == digests[0] for digest in digests)
    return digests[0]


@cache
def _on_one(name: str, shards: int) -> tuple[str, list[float]]:
    return _on_ranks(name, shards, 1, "blocking")


#: any strategy and size of messages, any number of ranks, states of optimisers, norms, and kernels
CASES = [
    *(("plain", *of_ranks, strategy) for of_ranks in ((8, 4), (6, 2)) for strategy in STRATEGIES),
    *(
        (name, *case)
        for name in ("residual", "residual adamw")
        for case in (
            (8, 2, "sharded 64"), (8, 8, "bucketed"), (6, 3, "sharded"), (6, 6, "bucketed 3000"), (12, 3, "bucketed 64"),
            (12, 4, "sharded 3000"), (24, 6, "sharded"), (24, 8, "bucketed"), (24, 12, "bucketed 3000"), (24, 24, "sharded"),
        )
    ),
    *(
        (name, *case)
        for name in ("wide lars", "wide lars clipping", "wide lamb", "wide clipping")
        for case in (
            (6, 2, "sharded"), (6, 3, "sharded 3000"), (8, 4, "priority"), (8, 2, "bucketed 3000"), (8, 8, "sharded 64"),
            (8, 4, "overlap"),
        )
    ),
    *(
        (f"{name} onednn", *case)
        for name in ("plain", "residual")
        for case in ((8, 2, "sharded"), (8, 4, "bucketed 64"), (6, 3, "sharded 3000"), (12, 4, "bucketed"))
    ),
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards", "ranks", "strategy"), CASES)
def test_any_training_has_the_bits_of_one_rank(name: str, shards: int, ranks: int, strategy: str) -> None:
    assert _on_ranks(name, shards, ranks, strategy) == _on_one(name, shards)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(4, 2), (1, 8), (8, 1), (2, 4)])
def test_a_training_goes_on_with_the_same_bits_on_other_ranks(first: int, then: int) -> None:
    task = replace(RESIDUAL, exact_shards=8)
    stop = int(np.random.default_rng((first, then)).integers(1, task.steps))
    content = run_virtual(first, lambda comm: _steps(task, comm, "sharded", range(stop)))[0][0]
    rest = range(stop, task.steps)
    for ended, losses in run_virtual(then, lambda comm: _steps(task, comm, "bucketed 64", rest, content)):
        assert (_sha256(dict(ended.tensors)), losses) == (_on_one("residual", 8)[0], _on_one("residual", 8)[1][stop:])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["residual", "residual onednn"])
@pytest.mark.parametrize("passes", [2, 3, 8])
def test_shards_may_be_computed_in_several_passes(name: str, passes: int) -> None:
    """Memory is needed for the shards of one pass; the bits do not tell."""
    task = replace(TASKS[name], exact_shards=8, micro_batches=passes)
    for ranks in (1, 2):
        for content, losses in run_virtual(ranks, lambda comm: _steps(task, comm, "sharded", range(task.steps))):
            assert (_sha256(dict(content.tensors)), losses) == _on_one(name, 8)


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_it_trains_what_the_ordinary_order_trains(name: str) -> None:
    """In float64 with shards as micro-batches, rounding alone differs."""
    task = replace(TASKS[name], dtype="float64", batch=16, samples=32)
    ordinary = run_virtual(1, lambda comm: train(replace(task, micro_batches=4), comm, virtual_engine(comm), Blocking))[0]
    exact = run_virtual(2, lambda comm: train(replace(task, exact_shards=4), comm, virtual_engine(comm), Sharded))[0]
    assert distance(exact.parameters, ordinary.parameters) < 1e-10
    assert not exact.statistics or distance(exact.statistics, ordinary.statistics) < 1e-10
    assert np.allclose([step.loss for step in exact.totals], [step.loss for step in ordinary.totals], rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Sharded, Bucketed])
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (2, 8), (3, 12)])
def test_ranks_with_one_sum_each_send_what_they_send_without_an_order(ranks: int, shards: int, strategy: type[Any]) -> None:
    def sent(comm: ThreadCommunicator, task: Task) -> int:
        counters = Counters()
        options = {"fc_exchange": "never"} if strategy is Sharded else {}
        replica = replica_of(task, CountingCommunicator(comm, counters), virtual_engine(comm), strategy, **options)
        before = counters.snapshot()
        for batch in batches(task, replica.groups.position, comm.size):
            replica.step(batch, task.lr)
        replica.drain()
        replica.settle()
        return counters.since(before).total().exchanged_bytes

    task = replace(RESIDUAL, steps=3, batch=24, samples=72)
    ordinary = run_virtual(ranks, lambda comm: sent(comm, task))
    exact = run_virtual(ranks, lambda comm: sent(comm, replace(task, exact_shards=shards)))
    for with_order, without in zip(exact, ordinary, strict=True):
        assert abs(with_order - without) * 100 <= without


@pytest.mark.parametrize("flip", [False, True])
def test_an_evaluation_has_the_bits_of_one_rank(flip: bool) -> None:
    task = replace(RESIDUAL, exact_shards=12)
    images, labels, _ = made_up(task)

    def evaluate(comm: ThreadCommunicator) -> tuple[float, int, int, int]:
        replica = replica_of(task, comm, virtual_engine(comm), Blocking)
        loaders = [
            ArrayLoader(array, labels, Sampler(len(images), 10, shuffle=False), **replica.place)
            for array in (images, images[:, :, ::-1])
        ]
        sums = replica.evaluate(loaders[0], mirrored=loaders[1] if flip else None)
        return sums.loss, sums.top1, sums.top5, sums.count

    expected = run_virtual(1, evaluate)[0]
    assert expected[3] == len(images)
    for ranks in (2, 3, 4):
        assert set(run_virtual(ranks, evaluate)) == {expected}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"exact_shards": 8}, "exact.shards is 8, which 3 ranks cannot share evenly; .*, or set .* 9"),
        ({"exact_shards": 2}, "exact.shards is 2, which 3 ranks cannot share evenly; .*, or set .* 3"),
        ({"exact_shards": 0}, "must be at least 1"),
        ({"model": nets.residual}, "bn1 computes batch statistics over all ranks"),
        ({"plan": ParallelPlan(3, 1, Parallelism.DOMAIN)}, "grid.rows is 3, but exact does not support ranks that share samples"),
    ],
)
def test_what_cannot_be_the_same_on_any_ranks_is_refused(changed: dict[str, Any], words: str) -> None:
    task = replace(PLAIN, **{"exact_shards": 6, **changed})
    with pytest.raises(ConfigError, match=words):
        run_virtual(3, lambda comm: replica_of(task, comm, virtual_engine(comm), Blocking))


def test_a_loader_without_shards_is_refused() -> None:
    task = replace(PLAIN, exact_shards=8, batch=10)

    def program(comm: ThreadCommunicator) -> None:
        replica = replica_of(task, comm, virtual_engine(comm), Blocking)
        for batch in batches(replace(task, exact_shards=None), replica.groups.position, comm.size):
            replica.step(batch, task.lr)

    with pytest.raises(
        ConfigError, match=r"The ranks have 5, 5 samples of a step, but 8 shards of 10 samples require 6, 4; create the"
    ):
        run_virtual(2, program)

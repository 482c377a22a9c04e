"""Short trainings on made-up data, for comparing one number of ranks, kernel set or averager with another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
from PIL import Image

from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import parameter_dtype
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.transports import Transport
from hpctrain.data.loader import ArrayLoader, Batch, TileOfRank
from hpctrain.data.pipeline import ImageSizes
from hpctrain.data.sampler import Mixing, Sampler
from hpctrain.nn.layers import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.training.metrics import StepTotals
from hpctrain.training.replica import LoopState, Replica, StrategyFactory
from hpctrain.training.snapshot import Position
from hpctrain.training.state_hashes import hash_of, state_hashes
from hpctrain.training.weight_watch import CheckCadence


@dataclass(frozen=True)
class Task:
    """A training: the same on every rank. `samples` need not be a multiple of `batch`, nor `batch` of the ranks.

    hash_steps: from one step after which hashes are taken, and compared with the state, to the next; 0: none are.
    skips: steps that are not finite are left out. poisoned_step: in this one the first rank reads images of NaN.
    unreadable: images are stored as bytes, and of these samples another one is read, the next that is none of them; None: they
    are numbers in memory. frozen: patterns of layers that are not trained. image_sizes: of shorter sides by epoch: stored images
    are resized, of numbers in memory some are left out or repeated; None: images keep their size. transport: of arrays of
    devices. exact_shards: terms of sums.
    """

    model: Callable[[], Layer]
    kernels: KernelSet
    optimizer: Callable[[], Optimizer]
    image_shape: tuple[int, int, int] = (9, 7, 3)
    classes: int = 5
    samples: int = 37
    batch: int = 8
    steps: int = 20
    lr: float = 0.05
    dtype: str = "float64"
    seed: int = 3
    micro_batches: int = 1
    smoothing: float = 0.1
    weighted: bool = False
    synchronised: bool = True
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    checks: CheckCadence = field(default_factory=CheckCadence)
    hash_steps: int = 0
    skips: bool = False
    poisoned_step: int | None = None
    unreadable: tuple[int, ...] | None = None
    ema: EmaRule | None = None
    mixing: Mixing | None = None
    frozen: tuple[str, ...] = ()
    image_sizes: ImageSizes | None = None
    transport: Transport = "staged"
    exact_shards: int | None = None

    @property
    def class_weights(self) -> tuple[float, ...]:
        """Weights of the classes in the loss; empty without weights, and if samples (with their labels) are replaced."""
        weighted = self.weighted and self.unreadable is None
        return tuple(0.25 + 0.7 * number for number in range(self.classes)) if weighted else ()

    def shape_at(self, epoch: int) -> tuple[int, int, int]:
        """(H, W, C) of an epoch's images."""
        if self.image_sizes is None:
            return self.image_shape
        height, width, channels = self.image_shape
        side = self.image_sizes.at(epoch)
        return height * side // min(height, width), width * side // min(height, width), channels


@dataclass
class Result:
    """Where a training ended, by name; averages of weights and statistics among these, as "ema/<name>"."""

    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    totals: list[StepTotals] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def made_up(task: Task, epoch: int = 0) -> tuple[np.ndarray, np.ndarray, Sampler]:
    """Images (samples, H, W, C) of an epoch, labels (samples,), and the order in which steps take them."""
    sampler = Sampler(task.samples, task.batch, seed=task.seed, shuffle=True)
    random = np.random.default_rng(task.seed)
    if task.unreadable is not None:
        pixels, labels = stored(task)
        actual = [_standing_in(sample, task) for sample in range(task.samples)]
        pixels = np.stack([_resized(image, task.shape_at(epoch)) for image in pixels])
        return (pixels[actual] / 255).astype(parameter_dtype(task.dtype)), labels[actual], sampler
    images = random.standard_normal((task.samples, *task.image_shape)).astype(parameter_dtype(task.dtype))
    labels = random.integers(0, task.classes, task.samples)
    (height, width, _), old = task.shape_at(epoch), task.image_shape
    rows, columns = np.arange(height) * old[0] // height, np.arange(width) * old[1] // width
    return images[:, rows][:, :, columns], labels, sampler


def _resized(image: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Pixels (h, w, C) as Pillow resizes them: columns, then rows."""
    height, width, _ = shape
    for size in ((width, image.shape[0]), (width, height)):
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    return image


def stored(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, H, W, C) uint8 and labels (samples,) as a data file has them."""
    random = np.random.default_rng(task.seed)
    pixels = random.integers(0, 256, (task.samples, *task.image_shape), dtype=np.uint8)
    return pixels, random.integers(0, task.classes, task.samples)


def _standing_in(sample: int, task: Task) -> int:
    """The sample that is read for one."""
    while sample in (task.unreadable or ()):
        sample = (sample + 1) % task.samples
    return sample


def batches(task: Task, position: int, positions: int, tiles: TileOfRank | None = None) -> Iterator[Batch]:
    """The shares of one position: synthetic images that depend on the sample alone.

    tiles: the box that each rank of a split group reads of the group's images, by their samples; None: its own samples.
    """
    place = {"split_size": task.plan.rows, "tiles": tiles, "shards": task.exact_shards}
    loader = ArraysByEpoch(task, rank=position, ranks=positions, **place)
    for number, batch in enumerate(islice((batch for epoch in count() for batch in loader.epoch(epoch)), task.steps)):
        poisoned = position == 0 and number == task.poisoned_step
        yield replace(batch, x=np.full_like(batch.x, np.nan)) if poisoned else batch


class ArraysByEpoch:
    """The batches of a task's numbers in memory, of the size that an epoch has.

    Args:
        place: of the rank, as an `ArrayLoader` receives it.
    """

    def __init__(self, task: Task, **place: Any) -> None:
        self._task, self._place = task, place
        self.sampler = made_up(task)[2]

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from its sample `first` on."""
        images, labels, _ = made_up(self._task, epoch)
        yield from self._loader(images, labels).epoch(epoch, first)

    def _loader(self, images: np.ndarray, labels: np.ndarray) -> ArrayLoader:
        task = self._task
        return ArrayLoader(images, labels, self.sampler, mixing=task.mixing, class_weights=task.class_weights, **self._place)


def replica_of(
    task: Task,
    comm: Communicator,
    progress: ProgressEngine,
    strategy: StrategyFactory,
    *,
    nominal_batch: int | None = None,
    loop: LoopState | None = None,
    **options: Any,
) -> Replica:
    """The replica that a task trains on the ranks of `comm`, on the grid of its plan; agreed. Collective.

    Args:
        strategy: the class, or what makes one; the class gets `options`.
    """
    if options:
        assert isinstance(strategy, type)
        strategy = partial(strategy, options=strategy.Options(**options))
    groups = GridGroups(ProcessGrid(comm, task.plan.rows, comm.size // task.plan.rows))
    replica = replica_on(task, groups, progress, strategy, nominal_batch=nominal_batch, loop=loop)
    replica.agree(transport=task.transport)
    return replica


def replica_on(
    task: Task,
    groups: GridGroups,
    progress: ProgressEngine,
    strategy: StrategyFactory,
    *,
    nominal_batch: int | None = None,
    loop: LoopState | None = None,
) -> Replica:
    """The replica that a task trains on these groups, before its ranks agree."""
    network = make_network(
        task.model(),
        task.image_shape,
        task.kernels,
        groups=groups,
        progress=progress,
        plan=task.plan,
        dtype=task.dtype,
        seed=task.seed,
        smoothing=task.smoothing,
        class_weights=task.class_weights,
        frozen=task.frozen,
    )
    return Replica(
        network,
        groups=groups,
        progress=progress,
        strategy=strategy,
        optimizer=task.optimizer,
        nominal_batch=nominal_batch,
        micro_batches=task.micro_batches,
        exact_shards=task.exact_shards,
        checks=task.checks,
        skips=task.skips,
        ema=task.ema,
        loop=loop,
    )


def train(
    task: Task,
    comm: Communicator,
    progress: ProgressEngine,
    strategy: StrategyFactory,
    *,
    keep_gradients: bool = False,
    **options: Any,
) -> Result:
    """Train for `task.steps` as `replica_of` says. Collective.

    Args:
        keep_gradients: of the first step, summed over all ranks; only where the averager leaves the sums in the gradients'
            buffers, as `Blocking` does.
    """
    replica = replica_of(task, comm, progress, strategy, **options)
    parameters = replica.network.parameters
    totals: list[StepTotals] = []
    gradients: dict[str, np.ndarray] = {}
    for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
        replica.step(batch, task.lr)
        if keep_gradients and not totals:
            gradients = {name: assemble(replica, name, parameter.grad) for name, parameter in parameters.items()}
        sums = replica.settle()
        assert sums is not None
        totals.append(replace(sums, statistics=sums.statistics.copy()))
        if len(totals) == 2:
            check_average(replica)
        if task.hash_steps and len(totals) % task.hash_steps == 0:
            check_hashes(replica)
    replica.require_alike()
    return replace(result_of(replica), totals=totals, gradients=gradients)


def result_of(replica: Replica) -> Result:
    """The parameters and statistics of a drained replica, with their averages. Collective."""
    parameters = _parameters(replica)
    statistics = {name: view.copy() for name, view in replica.network.statistics.views.items()}
    if replica.average is not None:
        check_average(replica)
        with replica.average.in_place():
            parameters |= {f"ema/{name}": values for name, values in _parameters(replica).items()}
        statistics |= {f"ema/{name}": view.copy() for name, view in replica.average.views.items()}
    return Result(parameters, statistics)


def check_average(replica: Replica) -> None:
    """In place of the weights are their averages, as owners keep them, and then the weights again, bit by bit. Collective."""
    if replica.average is None:
        return
    replica.drain()
    before = _parameters(replica)
    owned = [
        (segment, averager, np.array(replica.network.kernels.arithmetic.to_host(averager.optimizer.state(segment)["ema"])))
        for averager in replica.averagers.values()
        for segment in averager.owned()
    ]
    with replica.average.in_place():
        for segment, averager, values in owned:
            data = averager.group.arithmetic.to_host(averager.group.data[segment.start : segment.stop])
            assert data.tobytes() == values.tobytes(), f"{segment} is not its average"
    for name, values in _parameters(replica).items():
        assert values.tobytes() == before[name].tobytes(), f"{name} has not come back"


def check_hashes(replica: Replica) -> None:
    """The hashes of a settled replica are those of the whole tensors of its checkpoint, on every rank. Collective."""
    replica.drain()
    found, kept_back = state_hashes(replica), {name for averager in replica.averagers.values() for name in averager.by_holder}
    tensors = replica.state(Position(), {}).tensors.items()
    expected = {key: hash_of(values) for key, values in tensors if key.split("/")[1] not in kept_back}
    assert found == expected, f"hashes of {[key for key in found if found[key] != expected.get(key)]} are not those of the state"


def _parameters(replica: Replica) -> dict[str, np.ndarray]:
    return {name: assemble(replica, name, parameter.data) for name, parameter in replica.network.parameters.items()}


def assemble(replica: Replica, name: str, values: np.ndarray) -> np.ndarray:
    """A copy of a whole parameter, or gradient, of which this rank has `values`. Collective where it is split."""
    shard, holders = replica.network.shards[name], replica.groups.shard_holders
    copy = np.array(replica.network.kernels.arithmetic.to_host(values))
    if shard is None or holders is None:
        return copy
    return np.concatenate(holders.allgather_object(copy), axis=shard.dim)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest relative L2 distance |a - b| / |b| over the tensors (|b| = 0: |a|); infinite if a distance is not finite."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name in a:
        scale = float(np.linalg.norm(b[name].astype(np.float64))) or 1.0
        with np.errstate(over="ignore", invalid="ignore"):
            far = float(np.linalg.norm(a[name].astype(np.float64) - b[name])) / scale
        worst = max(worst, far if np.isfinite(far) else np.inf)
    return worst


def assert_same_training(result: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """Parameters, running statistics and losses within `tolerance` of the largest number of each, and the very same hits."""
    for ours, theirs in ((result.parameters, expected.parameters), (result.statistics, expected.statistics)):
        assert ours.keys() == theirs.keys()
        for name, aim in theirs.items():
            limit = tolerance * max(1.0, float(np.abs(aim).max(initial=0.0)))
            assert np.abs(ours[name] - aim).max(initial=0.0) <= limit, name
    for one, other in zip(result.totals, expected.totals, strict=True):
        assert (one.top1, one.top5, one.count) == (other.top1, other.top5, other.count)
        assert abs(one.loss - other.loss) <= tolerance * abs(other.loss)

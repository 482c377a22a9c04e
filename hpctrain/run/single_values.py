"""Finds batch norms with statistics over a single value per channel, from the plan, before the first step.

The variance of one value is 0. Such a layer outputs its bias alone, no layer before it is trained, and its running variance, by
which evaluation divides, tends to 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.specs import BatchNormSpec, TensorSpec
from hpctrain.config.grid import image_sizes, model_options, parallel_plan
from hpctrain.config.schema import SYNTHETIC, Config
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.intervals import even
from hpctrain.data.image_file import DataFacts
from hpctrain.data.sampler import counts
from hpctrain.models import catalogue
from hpctrain.nn.network import ImageShape, frozen_layers, with_frozen
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.run.images import Images, make_pipeline, open_images

#: scopes of images that share statistics: one shard, one rank, the ranks that share samples, or all ranks
_SHARD, _RANK, _GROUP, _ALL = "a shard", "a rank", "a split group", "the step"


@dataclass(frozen=True)
class SingleValues:
    """The outcome of the check.

    refusal: a sentence, if every step has such a layer; else None. warning: a sentence, if only the last step of an epoch has.
    """

    refusal: str | None = None
    warning: str | None = None

    def check(self) -> None:
        """Raise if every step has such a layer.

        Raises:
            ConfigError: the refusal.
        """
        if self.refusal is not None:
            raise ConfigError(self.refusal)


def single_values(
    config: Config, shapes: Iterable[ImageShape], classes: int, samples: int, plan: ParallelPlan, place: str
) -> SingleValues:
    """Check the batch norms of a training.

    Args:
        shapes: (H, W, C) of all sizes of training images. samples: of an epoch. place: of the images, for messages.
    """
    if config.epochs == 0:
        return SingleValues()
    whole, rest = min(config.batch, samples), samples % config.batch if samples > config.batch else 0
    found = {count: _first_single(config, shapes, classes, count, plan) for count in (whole, rest) if count}
    if (one := found.get(whole)) is not None:
        few = f", as {place} has {_images(samples)}" if samples < config.batch else ""
        return SingleValues(refusal=f"{one.sentence(f'every step, of {_images(whole)}{few}')}; {one.mend}.")
    if (one := found.get(rest)) is not None:
        step = f"the last step of each epoch, of {_images(rest)}"
        mend = f"choose a batch that divides the {samples:,} images of an epoch or leaves a larger rest"
        return SingleValues(warning=f"{one.sentence(step)}; {mend}")
    return SingleValues()


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count:,} images"


def single_values_of(config: Config, ranks: int | None = None) -> SingleValues:
    """Check the batch norms of a configuration, with the header of its training file. Finds nothing if the file is missing.

    Args:
        ranks: of the job. None: those of the configured grid, or one split group.
    """
    if config.automatic or (config.data.train != SYNTHETIC and not Path(config.data.train).exists()):
        return SingleValues()
    with suppress(HpctrainError, OSError):  # other faults are reported elsewhere
        file = open_images(config, "train")
        images = Images(file, make_pipeline(config, config.data.augment, DataFacts.of(file)), sizes=image_sizes(config))
        cols = (config.grid.cols or 1) if ranks is None else max(1, ranks // config.grid.rows)
        plan, classes = parallel_plan(config, cols), len(file.class_names)
        return single_values(config, images.shapes(config.epochs), classes, len(file), plan, config.data.train)
    return SingleValues()


@dataclass(frozen=True)
class _Single:
    """A layer with a single value.

    shape: (H, W) of the images. sharing: the images that share statistics, in words. mend: the end of the sentence.
    """

    layer: str
    shape: tuple[int, int]
    sharing: str
    mend: str

    def sentence(self, step: str) -> str:
        height, width = self.shape
        return (
            f"Batch norm {self.layer} has a single value per channel, so that it passes on its bias alone, in {step}: images of "
            f"{height} x {width} are 1 x 1 there, and the statistics are those of {self.sharing}, which has 1 image"
        )


def _first_single(config: Config, shapes: Iterable[ImageShape], classes: int, samples: int, plan: ParallelPlan) -> _Single | None:
    """Return the first layer with a single value in a step of `samples` samples; None if there is none."""
    sharing = {scope for scope in (_SHARD, _RANK, _GROUP, _ALL) if _least(config, samples, plan, scope) == 1}
    if not sharing:
        return None
    scope_of = _scope_of(config, plan)
    for shape in sorted(shapes):
        for node in _norms_of_one_pixel(_graph(config, classes, shape)):
            scope = scope_of(node)
            if scope in sharing:
                in_passes = (
                    f"{scope} in one of {config.micro_batches} passes" if config.micro_batches > 1 and scope != _SHARD else scope
                )
                return _Single(node.name, shape[:2], in_passes, _mend(config, plan, scope))
    return None


def _least(config: Config, samples: int, plan: ParallelPlan, scope: str) -> int:
    """Return the smallest number of samples, other than 0, that share statistics."""
    if scope == _SHARD:
        return min(filter(None, even(samples, config.exact.shards or 1)))
    size = {_RANK: 1, _GROUP: plan.rows, _ALL: plan.rows * plan.cols}[scope]
    of_ranks = counts(samples, plan.rows * plan.cols, plan.rows)
    teams = {of_ranks[first : first + size] for first in range(0, len(of_ranks), size)}  # most are alike
    return min(filter(None, (count for team in teams for count in _samples_of_passes(team, config.micro_batches))))


def _samples_of_passes(team: Sequence[int], passes: int) -> Sequence[int]:
    """Return the joint samples of some ranks in each pass. team: samples of each of these ranks in the step."""
    shares = [(ranks, even(count, passes)) for count, ranks in Counter(team).items()]
    return [sum(ranks * share[number] for ranks, share in shares) for number in range(passes)]


def _scope_of(config: Config, plan: ParallelPlan) -> Callable[[Node], str]:
    def scope(node: Node) -> str:
        assert isinstance(node.spec, BatchNormSpec)
        if config.exact.shards is not None:
            return _SHARD
        if node.spec.synchronised:
            return _ALL
        return _RANK if plan.rows == 1 or plan.use_of(node.name) is Parallelism.BATCH else _GROUP

    return scope


def _graph(config: Config, classes: int, shape: ImageShape) -> Graph:
    model = catalogue.build(config.model.name, model_options(config, classes, shape))
    builder = GraphBuilder(TensorSpec((1, *shape), "float32"))
    return with_frozen(builder.build(model.lower(builder, 0, "")), frozen_layers(model, config.init.freeze))


def _norms_of_one_pixel(graph: Graph) -> list[Node]:
    """Return the trained batch norms that have one value per image and channel."""
    norms = [node for node in graph.nodes if isinstance(node.spec, BatchNormSpec) and not node.spec.fixed]
    return [node for node in norms if math.prod(graph.tensors[node.output].shape[:-1]) == 1]


def _mend(config: Config, plan: ParallelPlan, scope: str) -> str:
    parts = {
        _SHARD: config.exact.shards or 1,
        _RANK: plan.rows * plan.cols * config.micro_batches,
        _GROUP: plan.cols * config.micro_batches,
        _ALL: config.micro_batches,
    }[scope]
    others = ["use larger images"]
    if scope in (_RANK, _GROUP) and plan.rows * plan.cols > 1:
        others.insert(0, "set batch_norm.statistics to synchronised")
    if scope == _SHARD and config.batch > 1:
        others.insert(0, f"set exact.shards to at most {config.batch // 2}")
    return f"set batch to at least {2 * parts}, or {', or '.join(others)}"

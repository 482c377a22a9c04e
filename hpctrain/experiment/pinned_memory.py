"""Pinned memory of the ranks of a planned run on devices: as much as the run will have, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.backend.operators import PixelInput
from hpctrain.config.data_section import SYNTHETIC
from hpctrain.data.deferred import leaves_resize
from hpctrain.data.facts import DataFacts
from hpctrain.data.image_file import ImageFile
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import counts
from hpctrain.experiment.image_sizes import of_largest
from hpctrain.run.images import make_pipeline, open_images
from hpctrain.experiment.planned_run import PlannedRun
from hpctrain.planner.group_schedules import GroupSchedule
from hpctrain.planner.mirror_bytes import mirror_bytes

# Averagers that send other arrays than those of their schedule's slices, as the steps go.
_UNTOLD = ("lazy", "sparse")


@dataclass(frozen=True)
class PlannedPinnedMemory:
    """Bytes by position. messages: mirrors of what travels between devices. images: batches of stored pixels.

    None where they are known in the run only: `messages` with several nodes of several ranks, split layers, exchanged inputs and
    errors, the averagers lazy and sparse, and another transport than staged; `images` where the data files are not there yet.
    """

    messages: tuple[int, ...] | None
    images: tuple[int, ...] | None


def pinned_memory(task: PlannedRun, averaged: Sequence[GroupSchedule]) -> PlannedPinnedMemory | None:
    """The pinned memory of a run; None where it computes in the memory of the host.

    Raises:
        HpctrainError: data files that cannot be read.
    """
    if task.kernels.arithmetic.on_host:
        return None
    return PlannedPinnedMemory(_of_messages(task, averaged), _of_images(task))


def _of_messages(task: PlannedRun, averaged: Sequence[GroupSchedule]) -> tuple[int, ...] | None:
    in_levels = any(group.order is not None for group in averaged)
    by_device = task.config.transport in ("mpi", "nccl")
    if task.plan.rows > 1 or in_levels or by_device or task.config.averager.name in _UNTOLD:
        return None
    item = item_bytes(parameter_dtype(task.config.dtype))
    of_groups = [mirror_bytes(group, item) for group in averaged]
    if any(of_ranks is None for of_ranks in of_groups):
        return None
    return tuple(sum(of_ranks) for of_ranks in zip(*filter(None, of_groups), strict=True))


def _of_images(task: PlannedRun) -> tuple[int, ...] | None:
    """Batches of training and of evaluation go through the same memory."""
    config = task.config
    splits = [("train", config.data.train), *([("test", config.data.test)] if config.data.test is not None else [])]
    if any(path != SYNTHETIC and not Path(str(path)).exists() for _, path in splits):
        return None
    train = open_images(config, "train")
    facts = DataFacts.of(train)
    pipeline = of_largest(config, make_pipeline(config, config.data.augment, facts))
    mixes = bool(config.data.mixing.mixes)
    largest = [0] * len(task.counts) if mixes else _of_batches(task, train, pipeline, config.batch, config.micro_batches)
    if config.data.test is not None:
        pipeline = make_pipeline(config, config.data.evaluate_augment, facts)
        of_test = _of_batches(task, open_images(config, "test"), pipeline, config.evaluate.batch or config.batch, 1)
        largest = [max(pair) for pair in zip(largest, of_test, strict=True)]
    return tuple(largest)


def _of_batches(task: PlannedRun, file: ImageFile, pipeline: Pipeline, batch: int, parts: int) -> list[int]:
    """By position, of batches of a file in so many parts."""
    of_ranks = counts(min(batch, len(file)), len(task.counts), task.plan.rows)
    if task.plan.rows > 1 or not pipeline.can_defer or not isinstance(task.kernels, PixelInput):
        return [0] * len(of_ranks)
    stored = pipeline.stored_shape(*file.shape)
    resizes = leaves_resize(pipeline.augmentations)
    return [task.kernels.pinned_input_bytes(-(-count // parts), stored, resizes=resizes) for count in of_ranks]

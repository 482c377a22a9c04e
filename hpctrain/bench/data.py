"""Measurements of `hpctrain bench data`: images per second of each stage of the data pipeline, and the stage that limits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hpctrain.assembly.images import make_pipeline, open_images
from hpctrain.assembly.recipe import ImageFacts, Recipe
from hpctrain.bench.engine_step import EngineStep, workload
from hpctrain.config.schema import AugmentConfig, Config
from hpctrain.core.text import counted
from hpctrain.data.image_file import DataFacts, ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler

READ, AUGMENT, NORMALISE, WHOLE = "read", "augment", "normalise", "whole batches"
_PREPARE = "prepare"
_ROUNDS = 5
_LEAST_SECONDS = 0.1  # minimum duration of one measurement
_MOST_IMAGES = 256
_MOST_BYTES = 1 << 28  # maximum size of the normalised images of a batch
_STEP_IMAGES, _STEPS = 16, 3

#: function that runs a stage for the batch with this number
PipelineStage = Callable[[int], object]


@dataclass(frozen=True)
class StageRate:
    """Rate of a stage with `threads` threads.

    Attributes:
        cpu_seconds: CPU time per image, summed over threads.
    """

    stage: str
    threads: int
    images_per_second: float
    cpu_seconds: float


@dataclass(frozen=True)
class DataRates:
    """Speed of the data pipeline for the training images of a configuration.

    Attributes:
        images: number of images of a measured batch.
        shape: (H, W, C) of the stored images.
        decodes: whether reading includes decoding.
        stages: rates of all stages; a stage that always runs in one thread appears only once.
        needed: images per second that a step of `model` with `step_threads` threads needs; None: no step was timed.
    """

    images: int
    shape: tuple[int, int, int]
    decodes: bool
    stages: tuple[StageRate, ...]
    model: str
    needed: float | None
    step_threads: int

    def rate(self, stage: str, threads: int) -> float:
        """Return the images per second of a stage; if it always runs in one thread, return the rate of that thread."""
        rates = {each.threads: each.images_per_second for each in self.stages if each.stage == stage}
        return rates.get(threads, rates[min(rates)])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages in their order, without augmentation if there is none."""
        measured = {each.stage for each in self.stages}
        return tuple(stage for stage in (READ, AUGMENT, NORMALISE, WHOLE) if stage in measured)

    @property
    def threads(self) -> tuple[int, ...]:
        """Measured numbers of threads."""
        return tuple(sorted({each.threads for each in self.stages if each.stage == WHOLE}))

    def slowest(self, threads: int) -> str:
        """Return the name of the slowest stage with `threads` threads."""
        return min((stage for stage in self.names if stage != WHOLE), key=lambda stage: self.rate(stage, threads))

    def sentence(self, threads: int) -> str:
        """Return a sentence about the stage that limits training if `threads` threads make batches."""
        made = f"{threads} {'thread makes' if threads == 1 else 'threads make'} {self.rate(WHOLE, threads):,.0f} images/s"
        stage = self.slowest(threads)
        if self.needed is None:
            return f"{stage} takes longest: {made}"
        needs = f"a {self.model} step with {counted(self.step_threads, 'thread')} needs"
        needs += f" {self.needed:,.0f}"
        if self.rate(WHOLE, threads) < self.needed:
            return f"{stage} limits: {made}, {needs}"
        return f"data do not limit: {made}, {needs} ({stage} takes longest)"


def measure(config: Config, threads: Sequence[int], step_threads: int, *, times_step: bool = True) -> DataRates:
    """Time the stages in turn for each number of `threads`, then a training step by itself, which has `step_threads` already.

    Raises:
        DataError: the data file cannot be opened, see `ImageFile.open`.
        ConfigError, ShapeError: augmentations or the model do not fit the images.
    """
    file = open_images(config, "train")
    facts = DataFacts.of(file)
    pipelines = {count: _pipeline(config, config.data.augment, facts, count) for count in threads}
    shape = pipelines[threads[0]].output_shape(*file.shape)
    images = max(1, min(config.batch, len(file), _MOST_IMAGES, _MOST_BYTES // (int(np.prod(shape)) * 8)))
    plain = {count: _pipeline(config, (), facts, count) for count in threads}
    timed = _timed(_stages(config, file, pipelines, plain, images))
    rates = [StageRate(stage, count, *_rate(*timed[stage, count], images)) for stage, count in timed if stage != _PREPARE]
    for count in threads if config.data.augment else ():
        prepared, normalised = timed[_PREPARE, count], timed[NORMALISE, count]
        rates.append(StageRate(AUGMENT, count, *_rate(*_less(prepared, normalised), images)))
    needed = _needed(config, file, shape) if times_step else None
    decodes = bool(getattr(file.pixels, "decodes", False))
    return DataRates(images, file.shape, decodes, tuple(rates), config.model.name, needed, step_threads)


def _pipeline(config: Config, augment: tuple[AugmentConfig, ...], facts: DataFacts, threads: int) -> Pipeline:
    pipeline = make_pipeline(config, augment, facts)
    pipeline.share_out(threads)
    return pipeline


def _stages(
    config: Config, file: ImageFile, pipelines: dict[int, Pipeline], plain: dict[int, Pipeline], images: int
) -> dict[tuple[str, int], PipelineStage]:
    """Return the timed work by (stage, threads); "prepare" is augmentation and normalisation, and `plain` only normalises."""
    shape = next(iter(pipelines.values())).output_shape(*file.shape)
    sampler = Sampler(len(file), images, seed=config.seed, shuffle=True)
    pixels, raw = file.pixels, np.empty((images, *file.shape), np.uint8)
    augmented, out = np.zeros((images, *shape), np.uint8), np.empty((images, *shape), config.dtype)
    whole = max(1, len(file) // images)

    def ids(number: int) -> np.ndarray:
        return sampler.ids(number // whole, number % whole)

    def read(number: int) -> object:
        if isinstance(pixels, np.ndarray):
            return np.take(pixels, ids(number), axis=0, out=raw, mode="clip")
        return pixels.take(ids(number), raw)

    def through(pipeline: Pipeline, stored: np.ndarray) -> PipelineStage:
        return lambda number: pipeline(stored, np.arange(images), number, out)

    stages: dict[tuple[str, int], PipelineStage] = {(READ, 1): read}
    for count, pipeline in pipelines.items():
        stages[NORMALISE, count] = through(plain[count], augmented)
        stages[_PREPARE, count] = through(pipeline, raw)
        stages[WHOLE, count] = _Batches(Loader(file, sampler, pipeline, prefetch=0))
    return stages


class _Batches:
    """Full batches of a loader, one per call, over consecutive epochs."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._epoch = loader, 0
        self._batches = loader.epoch(0)

    def __call__(self, number: int) -> object:
        batch = next(self._batches, None)
        if batch is None or batch.global_count < self._loader.sampler.batch:
            self._batches.close()
            self._epoch += 1
            self._batches = self._loader.epoch(self._epoch)
            batch = next(self._batches)
        return batch


def _timed(stages: dict[tuple[str, int], PipelineStage]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the median wall and CPU seconds of a batch for each stage. The stages take turns."""
    times_of: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in stages}
    repeats = {}  # batches in about 0.1 s, which is long enough to time
    for key, stage in stages.items():
        stage(0)  # not timed, because it allocates buffers
        begin = time.perf_counter()
        stage(0)
        repeats[key] = max(1, round(_LEAST_SECONDS / max(1e-6, time.perf_counter() - begin)))
    number = 1
    for _ in range(_ROUNDS):
        for key, stage in stages.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for _ in range(repeats[key]):
                stage(number)
                number += 1
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
            times_of[key].append((wall / repeats[key], cpu / repeats[key]))
    return {key: (median(wall for wall, _ in times), median(cpu for _, cpu in times)) for key, times in times_of.items()}


def _less(whole: tuple[float, float], share: tuple[float, float]) -> tuple[float, float]:
    """Return the difference of two (wall, CPU) times, bounded below by (1 ns, 0)."""
    return max(1e-9, whole[0] - share[0]), max(0.0, whole[1] - share[1])


def _rate(seconds: float, cpu_seconds: float, images: int) -> tuple[float, float]:
    return images / seconds, cpu_seconds / images


def _needed(config: Config, file: ImageFile, shape: tuple[int, int, int]) -> float | None:
    """Return the images per second of training steps alone; None if images are not square or the dtype is not float32."""
    if shape[0] != shape[1] or config.dtype != "float32":
        return None
    options = Recipe.of(config, ImageFacts((shape,), len(file.class_names))).model_options
    step = EngineStep(workload(config.model.name, min(config.batch, _STEP_IMAGES), shape[0], options), config.backend)
    step.run()
    seconds = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - begin)
    return step.task.batch / median(seconds)

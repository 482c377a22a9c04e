"""Loaders of data files, with one order of classes, one normalisation, and each rank's share.

An unreadable sample either ends the job, or is replaced by another one, reported and recorded.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Sequence

import numpy as np

from hpctrain.assembly.images import Images, open_images
from hpctrain.backend.operators import KernelSet, PixelInput
from hpctrain.comm.base import Communicator, Subject, compare, raise_on_all_ranks
from hpctrain.comm.waiting import guard
from hpctrain.config.schema import Config, Split
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import spans
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader, TileOfRank
from hpctrain.data.pipeline import default_threads
from hpctrain.data.readers import BlockReader, ReadPolicy, pauses_within
from hpctrain.data.sampler import Mixing, Sampler
from hpctrain.job.same_start import opened_file
from hpctrain.job.session import Session
from hpctrain.training.metrics import Reporter
from hpctrain.training.snapshot import Position

SKIP = "skip"


def set_policy(session: Session, images: Images) -> None:
    """Set how unreadable samples of a data file are handled, from the configuration. Synthetic images are always readable.

    Raises:
        ConfigError: samples may be skipped, but ranks share samples, so no rank can replace a sample alone.
    """
    file = images.file
    config, world = session.config, session.world
    skips = config.data.on_unreadable == SKIP
    check_skip(config, session.groups.split_size)
    if isinstance(file.pixels, BlockReader):
        rank = f"rank {world.rank} of {world.size}, " if world.size > 1 else ""
        most = math.ceil(config.data.max_unreadable * len(file)) if skips else None
        held_out = None
        if images.split is not None:
            held_out = np.zeros(len(file), bool)
            held_out[images.split.validation] = True
        place, pauses = f" (on {rank}{platform.node()})", pauses_within(config.deadline_seconds)
        file.pixels.set_policy(ReadPolicy(most, place, pauses, held_out))


def check_skip(config: Config, split_size: int) -> None:
    """Raise ConfigError if `data.on_unreadable` is "skip" although `split_size` ranks, more than one, share samples."""
    if config.data.on_unreadable == SKIP and split_size > 1:
        raise ConfigError(
            f"data.on_unreadable is skip, but grid.rows is {split_size}, and ranks that share samples cannot replace one; "
            "set data.on_unreadable to stop, or grid.rows to 1."
        )


class UnreadableReport:
    """Reporter of unreadable samples that any rank has replaced. It has no effect unless samples may be skipped."""

    def __init__(self, session: Session, files: Sequence[ImageFile], reporter: Reporter) -> None:
        self._world, self._reporter = session.world, reporter
        self._skips = session.config.data.on_unreadable == SKIP
        self._files = files
        self._reported: list[dict[int, int]] = [{} for _ in files]

    def record(self, position: Position) -> None:
        """Record the samples replaced since the previous call; report the first ones of each file. Collective."""
        if not self._skips:
            return
        here = [_replaced(file) for file in self._files]
        of_ranks = self._world.allgather_object(here)
        for number, (file, reported) in enumerate(zip(self._files, self._reported, strict=True)):
            found: dict[int, int] = {}
            for of_rank in of_ranks:
                found |= of_rank[number]
            new = {sample: found[sample] for sample in sorted(found.keys() - reported.keys())}
            if new and not reported:
                ranks = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[number]]
                where = f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
                others = f"other samples replace {'it' if len(new) == 1 else 'them'}"
                self._reporter.warn(f"warning: {_samples(new)} of {file.path} cannot be read on {where}; {others}")
            reported |= new
            if new:
                values = {"file": str(file.path), "samples": list(new), "instead": list(new.values()), "count": len(reported)}
                self._reporter.record("unreadable", {"epoch": position.epoch, "step": position.global_step, **values})

    def finish(self, position: Position) -> None:
        """Record new samples, and report the total of each file. Collective."""
        self.record(position)
        for file, reported in zip(self._files, self._reported, strict=True):
            if reported:
                self._reporter.warn(
                    f"{len(reported):,} of {len(file):,} samples of {file.path} could not be read; other samples replaced them"
                )


def _samples(numbers: Collection[int]) -> str:
    """Return the lowest of some samples' numbers and the count of the others, as text."""
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"sample {min(numbers)}{more}"


def _replaced(file: ImageFile) -> dict[int, int]:
    return dict(file.pixels.replaced) if isinstance(file.pixels, BlockReader) else {}


def open_alike(world: Communicator, config: Config, splits: Sequence[Split]) -> dict[Split, ImageFile]:
    """Open the configured files of some splits on every rank, and compare them between ranks. Collective.

    The call ends the job if a rank waits for the file system longer than the deadline.

    Raises:
        DataError: a file cannot be opened (see `ImageFile.open`), or differs from that of most ranks; on every rank.
    """

    def work() -> dict[Split, ImageFile]:
        files: dict[Split, ImageFile] = {}
        for split in splits:
            with guard(f"Opening data.{split}", config.deadline_seconds, rank=world.rank):
                files[split] = open_images(config, split)
                if world.size > 1:
                    subjects.append(opened_file(f"data.{split}", files[split]))
        return files

    subjects: list[Subject] = []
    files = raise_on_all_ranks(world, work)
    compare(world, *subjects)
    return files


def make_loader(
    session: Session,
    images: Images,
    tiles: TileOfRank | None,
    *,
    batch: int,
    shuffle: bool,
    kernels: KernelSet | None = None,
    shards: int | None = None,
    class_weights: Sequence[float] = (),
) -> Loader:
    """Return the loader of this rank's share of a data file, which reads the file without a cache.

    Args:
        kernels: kernel set that reads the batches. They contain uint8 pixels if it accepts these, otherwise normalised images.
            None: the latter.
        shards: number of shards that divide a batch (`exact.shards`); None: ranks divide it.
        class_weights: weight of each class in the loss of the steps; empty: all are 1.

    Raises:
        ConfigError: unreadable samples may be skipped, but ranks share samples.
    """
    config, groups = session.config, session.groups
    set_policy(session, images)
    threads = default_threads(session.threads.cores) if config.data.threads == "auto" else config.data.threads
    images.pipeline.share_out(threads)
    images.file.decode_by(threads)
    return Loader(
        images.file,
        Sampler(len(images), batch, config.seed, shuffle, images.subset),
        images.pipeline,
        rank=groups.position,
        ranks=groups.all_ranks.size,
        split_size=groups.split_size,
        tiles=tiles,
        shards=shards,
        prefetch=config.data.prefetch,
        mixing=configured_mixing(config) if shuffle else None,
        sizes=images.sizes,
        class_weights=class_weights,
        leaves_pixels=isinstance(kernels, PixelInput),
    )


def configured_mixing(config: Config) -> Mixing | None:
    """Return the mixing of training images; None if it is not configured."""
    chosen = config.data.mixing
    if not chosen.mixes:
        return None
    return Mixing(chosen.mixup, chosen.cutmix, chosen.probability, chosen.switch, config.seed)

"""Points as the program knows them: a configuration, and the job and candidate that the planner predicts from it."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.planner_points import AVERAGERS, NETWORKS, Point
from hpctrain.backend.choice import make_backend
from hpctrain.comm.base import Communicator
from hpctrain.config.schema import Config
from hpctrain.data.loader import ArrayLoader, Batch, LoaderRank
from hpctrain.data.sampler import Sampler
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
from hpctrain.planner.planned_run import PlannedRun, prepare
from hpctrain.run.build import build_replica
from hpctrain.training.replica import Replica


def configuration(point: Point, *, trace: bool = False) -> Config:
    """The configuration of a run that trains at this point. There is no such file of images: they are made up."""
    network = NETWORKS[point.network]
    averager, averager_options = AVERAGERS[point.averager]
    return Config.model_validate(
        {
            "name": "planner-accuracy",
            "backend": "onednn",
            "threads": 1,
            "model": {"name": network.model, **network.options},
            "data": {"train": "made-up.h5"},
            "batch": network.batch,
            "epochs": 1,
            "optimizer": {"name": "sgd", "lr": 1e-4, "momentum": 0.9},
            "schedule": "constant",
            "averager": {"name": averager, **averager_options},
            "grid": {"rows": point.rows, "cols": point.cols},
            "plan": {"default": point.default, **point.use},
            "progress": "test",
            "trace": trace,
        }
    )


def image_shape(point: Point) -> tuple[int, int, int]:
    """(H, W, C) of the images."""
    side = NETWORKS[point.network].pixels
    return side, side, 3


def planned_run(point: Point) -> PlannedRun:
    """The point without ranks and images."""
    return prepare(configuration(point), point.ranks, image_shape(point), NETWORKS[point.network].classes)


def started(config: Config, point: Point, world: Communicator) -> tuple[Session, Replica]:
    """A point's replica on a rank of `world`, ready to step. Collective over `world`."""
    launcher = detect(os.environ)
    session = Session.start(Resolved(config), launcher, set_threads(launcher, 1), world, {})
    backend = make_backend(config.backend, config.dtype, config.precision, session.place)
    replica = build_replica(session, backend, NETWORKS[point.network].classes, image_shape(point))
    replica.agree()
    return session, replica


def made_up_samples(point: Point, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up images (N, H, W, C) and labels (N,), the same ones on every rank."""
    random = np.random.default_rng(0)
    images = random.standard_normal((samples, *image_shape(point)), np.float32)
    return images, random.integers(0, NETWORKS[point.network].classes, samples)


def made_up_batch(point: Point, place: LoaderRank) -> Batch:
    """One rank's share of a step on made-up images."""
    batch = NETWORKS[point.network].batch
    images, labels = made_up_samples(point, batch)
    return next(ArrayLoader(images, labels, Sampler(batch, batch, shuffle=False), **place).epoch(0))

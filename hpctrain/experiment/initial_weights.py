"""The weights that a training starts from, where they are a file's and not drawn by the seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.config.schema import Config
from hpctrain.core.errors import CheckpointError
from hpctrain.job.same_start import Subject, compare
from hpctrain.job.session import Session
from hpctrain.models.state_dict import StateEntry, check_finite, check_fits, declared_state
from hpctrain.nn.network import Network
from hpctrain.storage import weights_file
from hpctrain.train.replica import Replica

_HINT = 'set init.ignore, as in ["fc.*"]'


def start_from_weights(session: Session, replica: Replica) -> None:
    """Write the configured weights, if any, into a replica that has not agreed yet. Collective.

    Raises:
        CheckpointError: the file cannot be read, does not fit the model, or is another one on some rank; alike on all ranks.
    """
    init = session.config.init
    if init.weights is not None:
        put_weights(session.world, replica, Path(init.weights), init.ignore, session.config.model.name)


def put_weights(
    world: Communicator, replica: Replica, path: Path, ignore: Sequence[str], model: str, *, hint: str = _HINT
) -> None:
    """Write the weights of a file into a replica. Collective.

    Every rank reads the file, whose bytes are then on no network but that of the file system, and takes its part of split layers.

    Args:
        ignore: patterns of names that keep their values. model: its name in messages.
        hint: how names are left out, in words.

    Raises:
        CheckpointError: as `start_from_weights`; no rank's replica has changed then.
    """
    network = replica.network
    compare(world, raise_on_all_ranks(world, lambda: read_weights(world, path)))
    entries = declared_state(network.model)

    advice = f"Where a layer is meant to begin by the seed, as for another number of classes, {hint}."

    def fitting() -> dict[str, np.ndarray]:
        tensors = weights_file.read(path).tensors
        ignored = check_fits(entries, tensors, source=str(path), model=model, ignore=ignore, hint=advice)
        fitting_tensors = {name: tensors[name] for name in entries if name not in ignored}
        check_finite(fitting_tensors, str(path), network.parameter_dtype)
        return fitting_tensors

    state = raise_on_all_ranks(world, fitting)
    replica.drain()
    _put(replica, entries, state)
    replica.parameters_written()


def read_weights(world: Communicator, path: Path) -> Subject:
    """Return the facts of a file of weights, which ranks must have alike. A single rank does not read the file.

    Raises:
        CheckpointError: there is no such file, or its name has an unknown suffix.
    """
    weights_file.check_suffix(path, weights_file.SUFFIXES)
    if not path.is_file():
        raise CheckpointError(f"There is no file of weights {path}; give the path of one.")
    facts = {} if world.size == 1 else {"sha256": weights_file.checksum(path)[:16]}
    return Subject("another file of weights", f"give all nodes the same {path}", facts, error=CheckpointError)


def _put(replica: Replica, entries: Mapping[str, StateEntry], state: Mapping[str, np.ndarray]) -> None:
    network = replica.network
    for name, array in state.items():
        values = entries[name].restore(array)
        if name in network.parameters:
            share = replica.shards.part(name, values.astype(network.parameter_dtype, copy=False))
            network.kernels.arithmetic.from_host(network.parameters[name].data, share)
        else:
            network.statistics.views[name][...] = values
    network.parameters_changed()


def describe_start(config: Config, network: Network) -> Iterator[str]:
    """Sentences about what a training starts from and leaves as it is; none where all is drawn by the seed and trained."""
    init = config.init
    if init.weights is not None:
        left_out = f", without {', '.join(init.ignore)}" if init.ignore else ""
        yield f"weights of {init.weights}{left_out}"
    if network.frozen:
        trained = sum(math.prod(network.parameter_specs[name].shape) for name in network.trained)
        layers = "layer" if len(network.frozen) == 1 else "layers"
        yield f"{len(network.frozen)} {layers} frozen: {trained:,} parameters are trained"

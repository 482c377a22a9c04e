"""Code of the user's in a run: the same on every rank, and none that only a checkpoint names."""

from __future__ import annotations

from hpctrain import user_code
from hpctrain.comm.base import Communicator
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.experiment.options import named, names


def check_alike(world: Communicator) -> None:
    """Compare the code that the ranks have loaded. Collective; every rank raises the same error.

    Raises:
        ConfigError: a rank has loaded other code under a name than rank 0.
    """
    loaded = world.allgather_object(user_code.digests())
    for rank, digests in enumerate(loaded):
        if digests != loaded[0]:
            reference = next(key for key in (*loaded[0], *digests) if loaded[0].get(key) != digests.get(key))
            raise ConfigError(
                f'Rank {rank} has other code for "{reference}" than rank 0 ({digests.get(reference)}, not '
                f"{loaded[0].get(reference)}); give all nodes the same files."
            )


def is_trusted(stored: Config, config: Config) -> bool:
    """True where looking at `stored`, of a checkpoint, imports no code that `config` does not name."""
    return all(name in names(kind) for kind, name in set(named(stored)) - set(named(config)))

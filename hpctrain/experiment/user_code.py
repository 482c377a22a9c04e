"""Code of the user's in a run: the same on every rank, and none that only a checkpoint names."""

from __future__ import annotations

from hpctrain.core import user_code
from hpctrain.comm.base import Communicator
from hpctrain.config.schema import Config
from hpctrain.config.options import named, names
from hpctrain.job.same_start import Subject, compare


def check_alike(world: Communicator) -> None:
    """Compare the code that the ranks have loaded, and the user's modules that it imports. Collective.

    Raises:
        ConfigError: a rank has loaded other code than most ranks under the same name; the same error on every rank.
    """
    if world.size > 1:
        mend = "give all nodes the same files"
        of_references = Subject("other code", mend, user_code.digests())
        compare(world, of_references, Subject("other code", mend, user_code.modules(), partial=True))


def is_trusted(stored: Config, config: Config) -> bool:
    """True where looking at `stored`, of a checkpoint, imports no code that `config` does not name."""
    return all(name in names(kind) for kind, name in set(named(stored)) - set(named(config)))

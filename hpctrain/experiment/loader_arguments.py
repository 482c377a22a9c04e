"""Arguments of the loaders that a program makes, checked against its replica."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.data.mixing import Mixing
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.core.registry import check_options
from hpctrain.train.replica import Replica


def check_shape(shape: tuple[int, ...], replica: Replica) -> None:
    """Make sure that a replica takes images of a shape (H, W, C).

    Raises:
        ShapeError: it takes others.
    """
    expected = replica.network.image_shape
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"Images come out as {tuple(shape)}, but the replica takes {expected} (H, W, C); make it for those.")


def mixing_of(options: Mapping[str, float] | None, seed: int, replica: Replica) -> Mixing | None:
    """The mixing of a loader's images.

    Raises:
        ConfigError: an option that there is not, a value outside its range, or a loss that takes one label of each sample.
    """
    if options is None:
        return None
    mixing = Mixing(**check_options(Mixing, "the mixing of images", options, reserved=("seed",)), seed=seed)
    if mixing.mixes and not replica.network.kernels.arithmetic.on_host:
        raise ConfigError(
            'The loss of backend "cuda" takes one label of each sample so far, so it takes no mixed images; leave mixing out.'
        )
    return mixing

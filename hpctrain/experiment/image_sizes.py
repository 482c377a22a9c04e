"""The sizes of training images by epoch, as a configuration has them, and the models that take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from hpctrain.config.schema import Config
from hpctrain.core.yaml_source import KeyPath
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sizes import ImageSizes, first_fault
from hpctrain.core.errors import HpctrainError, ShapeError
from hpctrain.config.grid import model_graph
from hpctrain.models import catalogue
from hpctrain.nn.network import ImageShape, Network


def image_sizes(config: Config) -> ImageSizes | None:
    """The sizes by epoch; None: training images have one size.

    Raises:
        ConfigError: sizes that are out of order.
    """
    return ImageSizes(_steps(config)) if config.data.sizes else None


def of_largest(config: Config, pipeline: Pipeline) -> Pipeline:
    """The pipeline of training images of the largest size, for which memory and plans are computed."""
    sizes = image_sizes(config)
    return pipeline if sizes is None else pipeline.resized(sizes.largest(config.epochs))


def size_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of sizes that are out of order, or that the model does not take, whatever the data."""
    fault = first_fault(_steps(config))
    if fault is not None:
        yield ("data", "sizes", fault[0]), f"data.sizes.{fault[0]} {fault[1]}."
        return
    if not config.data.sizes or model_graph(config) is None:  # what is wrong with the model has a sentence of its own
        return
    for number, step in enumerate(config.data.sizes):
        try:
            model_graph(config, step.size, refuses=True)
        except ShapeError as error:
            least = _least(config, step.size)
            legal = "" if least is None else f" The smallest size that is legal is {least}."
            yield (
                ("data", "sizes", number, "size"),
                f"data.sizes.{number}.size is {step.size}, which the model {config.model.name} does not take: {error}{legal}",
            )


def check_image_shapes(network: Network, shapes: Iterable[ImageShape]) -> None:
    """Nothing, where a network takes images of further shapes (H, W, C), too.

    Raises:
        ShapeError: it does not; the sentence names the shape and the layer.
    """
    for shape in shapes:
        try:
            network.check_shape(shape)
        except ShapeError as error:
            raise ShapeError(
                f"The model takes images of {network.image_shape} (H, W, C), but not those of {shape}, another size of this "
                f"training or its evaluation: {error}"
            ) from None


def _steps(config: Config) -> tuple[tuple[int, int], ...]:
    return tuple((step.from_epoch, step.size) for step in config.data.sizes)


def _least(config: Config, refused: int) -> int | None:
    """The smallest side above a refused one that the model takes, by halving; None where its own images are no larger."""
    least = min(catalogue.image_shape(config.model.name)[:2])
    if least <= refused:
        return None
    while least - refused > 1:
        middle = (least + refused) // 2
        with suppress(HpctrainError):
            model_graph(config, middle, refuses=True)
            least = middle
            continue
        refused = middle
    return least

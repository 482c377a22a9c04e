"""Filters of a first convolution that whiten patches of images: outputs are uncorrelated, with variances of at most 1.

The negatives of the filters may follow them; their outputs are the negative outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import Conv2dSpec
from hpctrain.core.errors import ConfigError, ShapeError

#: added to the variances of normalised pixels, so that directions with hardly any variance are not enlarged to noise
EPSILON = 5e-4


def whitened_convolution(graph: Graph, name: str) -> Conv2dSpec:
    """Return the convolution `name` of a model that `whitening_filters` can initialise.

    Raises:
        ConfigError: there is no such convolution of the images, it has groups, or it has more than two filters for each value of
            a patch.
    """
    legal = [node.name for node in graph.nodes if isinstance(node.spec, Conv2dSpec) and node.inputs == (0,)]
    spec = next((node.spec for node in graph.nodes if node.name == name and name in legal), None)
    if not isinstance(spec, Conv2dSpec):
        nearest = f"that of this model is {legal[0]}" if legal else "this model has none"
        raise ConfigError(f"init.whiten is {name}, but must be the name of a convolution of the images; {nearest}.")
    most = 2 * int(np.prod(spec.weight_shape[1:]))
    if spec.groups > 1 or spec.channels_out > most:
        raise ConfigError(
            f"init.whiten is {name}, a convolution of {spec.channels_out} filters in {spec.groups} groups, but whitening needs 1 "
            f"group and at most {most} filters, two for each value of a patch; leave init.whiten out."
        )
    return spec


def whitening_filters(images: Iterable[NDArray[np.float64]], spec: Conv2dSpec) -> NDArray[np.float64]:
    """Return the weight (K, R, S, C) of whitening filters, in float64.

    The filters are the eigenvectors of the covariance of the images' patches, divided by the roots of (eigenvalue + EPSILON), the
    largest eigenvalue first; then the negatives of these filters, which a ReLU after them needs (Page 2018, part 8).

    Args:
        images: images (H, W, C) in the units of the network's input, at least one.
        spec: convolution, see `whitened_convolution`.

    Raises:
        ShapeError: an image is smaller than a filter.
    """
    height, width = spec.window.extent
    count, *patch = spec.weight_shape
    size, (rows, columns) = int(np.prod(patch)), spec.window.dilation
    total, products, samples = np.zeros(size), np.zeros((size, size)), 0
    for image in images:  # all patches of all images at once would need many times the memory of the images
        if image.shape[0] < height or image.shape[1] < width:
            raise ShapeError(
                f"The images have {image.shape[0]} x {image.shape[1]} pixels, but the filters that init.whiten computes from "
                f"them cover {height} x {width}; set init.whiten to null, or use images of at least {height} x {width} pixels."
            )
        windows = np.lib.stride_tricks.sliding_window_view(image, spec.window.extent, (0, 1))[..., ::rows, ::columns]
        patches = np.moveaxis(windows, 2, -1).reshape(-1, size)
        total += patches.sum(0)
        products += patches.T @ patches
        samples += len(patches)
    mean = total / samples
    variances, directions = np.linalg.eigh(products / samples - np.outer(mean, mean))
    filters = (directions / np.sqrt(np.maximum(variances, 0.0) + EPSILON)).T[::-1]
    return np.concatenate([filters, -filters])[:count].reshape(spec.weight_shape)

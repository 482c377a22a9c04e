"""The things that the operators of one set share: the device, the stream of all computation, the way to launch a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.cuda.device import Argument, Device, DeviceStream, Extent, Precision, grid_for
from hpctrain.backend.dtypes import parameter_dtype

#: in the names of kernels
TAGS = {"float64": "f64", "float32": "f32", "bfloat16": "bf16"}
#: threads of a block that strides over items
THREADS = 256


@dataclass(frozen=True)
class CudaRuntime:
    """Settings that all operators of a device share.

    stream: the one that all kernels run on. precision: of products in convolutions and linear layers.
    threads: of a block that strides over items. graphs: programs are captured as CUDA graphs.
    """

    device: Device
    stream: DeviceStream
    precision: Precision = "float32"
    threads: int = field(default=THREADS)
    graphs: bool = True

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return "float32" if self.precision == "tf32" else self.precision

    @property
    def parameter_dtype(self) -> str:
        """The dtype of parameters, gradients and statistics."""
        return parameter_dtype(self.dtype)

    def launch(self, source: str, kernel: str, grid: Extent, block: Extent, *arguments: Argument) -> None:
        """Enqueue a kernel of kernels/<source>.cu; nothing where the grid is empty."""
        if 0 not in grid:
            self.device.kernel(source, kernel)(self.stream, grid, block, *arguments)

    def launch_items(self, source: str, kernel: str, items: int, *arguments: Argument) -> None:
        """Enqueue a kernel that strides over `items`, given to it as its last argument (int64)."""
        grid = grid_for(items, self.threads, self.device.multiprocessors)
        self.launch(source, kernel, grid, (self.threads,), *arguments, np.int64(items))

"""A network's input, computed on a device from stored pixels, which are uploaded while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hpctrain.backend.cuda.device import Argument, DeviceArray, DeviceStream, pack_width
from hpctrain.backend.cuda.operator import check_images, row_launch
from hpctrain.backend.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.pixels import PixelBatch, Resampling, most_taps
from hpctrain.backend.specs import parameter_dtype

#: number of batches with separate memory, so that one is read while the next is uploaded
RING = 2

_ALIGNMENT = 16  # alignment of the parts of a batch, in bytes


class CudaPixelInput:
    """Computation of inputs from batches of pixels, one batch after another.

    Pinned memory and device memory are allocated for the first batch, and again if a batch is larger than all previous ones.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._copies: DeviceStream | None = None
        self._ring: deque[_Slot] = deque()
        self._table: DeviceArray | None = None

    def make(self, target: DeviceArray, images: PixelBatch) -> None:
        """Enqueue target := images, which have the same shape.

        The call waits for the upload of the batch before the previous one, whose memory is reused. If the memory must grow, it
        waits for all work of the stream instead.

        Raises:
            BackendError: the images are too large for the kernel.
        """
        assert target.shape == images.shape, f"images {images.shape} do not fit {target!r}"
        assert images.dtype == parameter_dtype(target.dtype), f"images of {images.dtype} are not rounded to {target!r}"
        check_images("data path", images.shape, images.pixels.shape)
        if target.size:
            boxes = np.zeros((0, 4), np.int32) if images.resampling is None else images.resampling.boxes
            parts = images.scale, images.shift, images.windows, boxes, images.pixels
            scale, shift, windows, boxes_there, pixels = self._uploaded(parts)
            by_channel = (place.view(str(images.dtype)) for place in (scale, shift))
            resize: tuple[Argument, ...] = ()
            if images.resampling is not None:
                resize = self._resize(images.resampling, boxes_there.view("int32"), images.pixels.shape[1:3])
            self._launch(target, images, (pixels, windows.view("int32"), *by_channel), resize)
            self._runtime.stream.record(self._ring[-1].read)

    def _uploaded(self, parts: Sequence[np.ndarray]) -> list[DeviceArray]:
        """Enqueue the upload of a batch's parts as one copy, and return the parts on the device, uint8.

        Later work of the runtime's stream waits for the upload.
        """
        starts = _places([part.nbytes for part in parts])
        if not self._ring or self._ring[-1].memory.size < starts[-1]:
            self._grow(starts[-1])
        self._ring.rotate(-1)
        slot = self._ring[-1]
        slot.fill(parts, starts)
        assert self._copies is not None, "a ring has a stream"
        self._copies.wait(slot.read)
        self._runtime.device.upload(self._copies, slot.memory[: starts[-1]], slot.pinned[: starts[-1]])
        self._copies.record(slot.uploaded)
        self._runtime.stream.wait(slot.uploaded)
        return [slot.memory[start : start + part.nbytes] for start, part in zip(starts, parts, strict=False)]

    def _grow(self, size_bytes: int) -> None:
        if self._copies is None:
            self._copies = self._runtime.device.stream("pixels")
        self._runtime.stream.synchronize()  # this stream waits for all uploads, so the old memory is not in use any more
        self._ring.clear()
        self._ring.extend(_Slot(self._runtime, size_bytes) for _ in range(RING))

    def _resize(self, resampling: Resampling, boxes: DeviceArray, stored: tuple[int, int]) -> tuple[Argument, ...]:
        """Enqueue the table of taps of images `stored` as (h, w), and return the kernel's arguments for resizing."""
        most = max(most_taps(size, made) for size, made in zip(stored, resampling.size, strict=True))
        entries = len(resampling.boxes) * sum(resampling.size)
        if self._table is None or self._table.size < entries * (2 + most):
            self._table = self._runtime.device.allocate(4 * entries * (2 + most)).view("int32")
        sizes = [np.int32(number) for number in (*resampling.size, most, resampling.interpolates)]
        self._runtime.launch_items("pixels", "make_taps", entries, self._table, boxes, *sizes)
        return boxes, self._table, *sizes

    def _launch(
        self, target: DeviceArray, images: PixelBatch, parts: Sequence[DeviceArray], resize: tuple[Argument, ...]
    ) -> None:
        count, height, width, channels = images.shape
        size = width * channels
        pack = 1 if resize else pack_width(target.itemsize, size, (target,))
        grid, block = row_launch(count * height, size // pack, self._runtime.device.multiprocessors)
        fill = np.dtype(parameter_dtype(target.dtype)).type(images.fill)
        sizes = [np.int32(number) for number in (*images.pixels.shape[1:], height, size, count * height)]
        name = f"{'resample' if resize else 'make'}_input_{TAGS[target.dtype]}_w{pack}"
        self._runtime.launch("pixels", name, grid, block, target, *parts, fill, *sizes, *resize)


class _Slot:
    """Memory of one batch.

    Attributes:
        uploaded: event after the upload of the batch.
        read: event after the kernels that read the batch.
    """

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        device = runtime.device
        self.pinned, self.memory = device.pinned(size_bytes), device.allocate(size_bytes)
        self.uploaded, self.read = device.event(), device.event()

    def fill(self, parts: Sequence[np.ndarray], starts: Sequence[int]) -> None:
        """Copy parts of a batch to the offsets `starts` of pinned memory, after its latest upload is done."""
        self.uploaded.synchronize()
        for start, part in zip(starts, parts, strict=False):
            place = self.pinned[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            np.copyto(place, part)


def _places(sizes_bytes: Sequence[int]) -> list[int]:
    """Return the offset of each part in a batch's memory, in bytes, and the size of the memory."""
    starts = [0]
    for size_bytes in sizes_bytes:
        starts.append(-(-(starts[-1] + size_bytes) // _ALIGNMENT) * _ALIGNMENT)
    return starts

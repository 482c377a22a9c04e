"""Version 1 of the data format, read without HDF5.

Files of version 1 are in HDF5's oldest format, whose structures have no checksums: a damaged byte could make HDF5 loop endlessly
or crash. They consist of few kinds of structures, always of the same versions. Here every address and length is checked against
the file, every loop is as long as a count says that was read once, and what is not as our writer left it is damage.

Letters and names are those of the HDF5 File Format Specification, version 3.0 (support.hdfgroup.org); numbers are little-endian,
addresses and lengths have 8 bytes.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.format import DATASETS, Stored, StoredImages

_SUPERBLOCK = struct.Struct("<8s8BHHI4Q")  # signature; versions, sizes of addresses and lengths; nodes; flags; addresses
_ROOT_ENTRY = struct.Struct("<QQI4xQQ")  # name, object header, cache type, and of the cache: B-tree, heap
_OBJECT_HEADER = struct.Struct("<BxHIIxxxx")
_MESSAGE = struct.Struct("<HHBxxx")
_SYMBOL = struct.Struct("<QQ24x")
_HEAP_REFERENCE = struct.Struct("<IQI")
_HEAP_OBJECT = struct.Struct("<HH4xQ")
_DATASPACE, _DATATYPE, _LAYOUT, _ATTRIBUTE, _CONTINUATION = 0x01, 0x03, 0x08, 0x0C, 0x10
_CONTIGUOUS = 1
_INTEGER, _FLOAT, _STRING, _VARIABLE_LENGTH = 0, 1, 3, 9
#: no structure is larger; keeps a damaged length from reading the whole file
_LONGEST_BYTES = 1 << 20
_MOST_MESSAGES = 1000


class DamageError(Exception):
    """A structure that is not as it was written."""


@dataclass(frozen=True)
class _Object:
    """The messages of an object header, by type."""

    messages: tuple[tuple[int, bytes], ...]

    def one(self, kind: int) -> bytes:
        for message, body in self.messages:
            if message == kind:
                return body
        raise DamageError(f"a message of type {kind} is missing")


class OldFile:
    """An open file of HDF5's old format. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._heap: dict[int, dict[int, tuple[int, int]]] = {}  # of each collection: where its objects are

    def __enter__(self) -> OldFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    def header(self) -> dict[str, object]:
        """The attributes of the root.

        Raises:
            DamageError: see `contents`.
        """
        return self._attributes(self._object(self._root()[0]))

    def contents(self) -> Stored:
        """All of a data file but its pixels.

        Raises:
            DamageError, struct.error, ValueError: something is not as it was written.
        """
        objects = {name: self._object(address) for name, address in self._names()}
        missing = [name for name in DATASETS if name not in objects]
        if missing:
            raise DamageError(f"there is no dataset {missing[0]}")
        labels = self._values(objects["labels"], "<i8")
        mean, std = (self._values(objects[name], "<f8") for name in ("mean", "std"))
        return Stored(
            self._images(objects["images"]),
            labels,
            mean,
            std,
            self._class_names(objects["class_names"]),
            {name: str(self._attributes(objects[name])["sha256"]) for name in DATASETS},
        )

    def _take(self, start: int, count: int) -> bytes:
        if start + count > len(self._bytes):
            raise DamageError(f"the file is truncated: bytes {start} to {start + count} of {len(self._bytes)} are asked for")
        return self._bytes[start : start + count]

    def _block(self, start: int, count: int) -> bytes:
        if count > _LONGEST_BYTES:
            raise DamageError(f"a structure of {count} bytes at {start}")
        return self._take(start, count)

    def _unpack(self, layout: struct.Struct, start: int) -> tuple[Any, ...]:
        return layout.unpack(self._block(start, layout.size))

    def _signed(self, signature: bytes, start: int) -> int:
        """The place after a signature, which must be there."""
        if self._block(start, len(signature)) != signature:
            raise DamageError(f"{signature.decode()} is missing at byte {start}")
        return start + len(signature)

    def _root(self) -> tuple[int, int, int]:
        """Addresses of the root's object header, B-tree and heap."""
        _, *versions, _, _, _, base, _, end, _ = self._unpack(_SUPERBLOCK, 0)
        if versions != [0, 0, 0, 0, 0, 8, 8, 0] or base != 0:
            raise DamageError("the superblock is of another version")
        self._take(0, end)
        _, header, cached, tree, heap = self._unpack(_ROOT_ENTRY, _SUPERBLOCK.size)
        if cached != 1:
            raise DamageError("the root is no group")
        return header, tree, heap

    def _names(self) -> Iterator[tuple[str, int]]:
        """(name, address of the object header) of all datasets: a B-tree of one leaf, whose names are in a heap."""
        _, tree, heap = self._root()
        kind, level, count = struct.unpack("<BBH", self._block(self._signed(b"TREE", tree), 4))
        if (kind, level, count) != (0, 0, 1):
            raise DamageError("the root has more names than our writer gives it")
        (leaf,) = struct.unpack("<Q", self._block(tree + 32, 8))  # after signature, kind, two neighbours, and a key
        version, symbols = struct.unpack("<BxH", self._block(self._signed(b"SNOD", leaf), 4))
        size, _, start = struct.unpack("<4x3Q", self._block(self._signed(b"HEAP", heap), 28))
        texts = self._block(start, size)
        if version != 1:
            raise DamageError("a symbol table is of another version")
        for number in range(symbols):
            name, address = self._unpack(_SYMBOL, leaf + 8 + number * _SYMBOL.size)
            yield texts[name : texts.index(b"\0", name)].decode(), address

    def _object(self, address: int) -> _Object:
        version, count, _, length = self._unpack(_OBJECT_HEADER, address)
        if version != 1 or count > _MOST_MESSAGES:
            raise DamageError(f"the object header at {address} is of another version")
        blocks = [(address + _OBJECT_HEADER.size, length)]
        messages: list[tuple[int, bytes]] = []
        while blocks and len(messages) < count:  # a block that continues another counts as a message, so this ends
            start, length = blocks.pop(0)
            end = start + length
            while start + _MESSAGE.size <= end and len(messages) < count:
                kind, size, _ = self._unpack(_MESSAGE, start)
                body = self._block(start + _MESSAGE.size, size)
                messages.append((kind, body))
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack_from("<QQ", body))
                start += _MESSAGE.size + size
        if len(messages) != count:
            raise DamageError(f"the object header at {address} has {len(messages)} messages and not {count}")
        return _Object(tuple(messages))

    def _attributes(self, item: _Object) -> dict[str, object]:
        result: dict[str, object] = {}
        for body in (body for kind, body in item.messages if kind == _ATTRIBUTE):
            version, name_bytes, type_bytes, space_bytes = struct.unpack_from("<BxHHH", body)
            if version != 1:
                raise DamageError("an attribute is of another version")
            place, parts = 8, []
            for size in (name_bytes, type_bytes, space_bytes):
                parts.append(body[place : place + size])
                place += -(-size // 8) * 8
            result[parts[0].split(b"\0")[0].decode()] = self._scalar(parts[1], body[place:])
        return result

    def _scalar(self, datatype: bytes, data: bytes) -> object:
        kind, size = datatype[0] & 0x0F, struct.unpack_from("<I", datatype, 4)[0]
        if kind == _INTEGER and size <= len(data):
            return int.from_bytes(data[:size], "little")
        if kind == _STRING and size <= len(data):  # only other programs write these; read to recognise their files
            return data[:size].rstrip(b"\0")
        if kind == _VARIABLE_LENGTH:
            return self._text(data)
        raise DamageError(f"an attribute is of type {kind}")

    def _text(self, reference: bytes) -> str:
        """A text of the global heap."""
        length, collection, number = _HEAP_REFERENCE.unpack_from(reference)
        if collection not in self._heap:
            self._heap[collection] = dict(self._heap_objects(collection))
        if number not in self._heap[collection]:
            raise DamageError(f"the heap at {collection} has no object {number}")
        start, stored = self._heap[collection][number]
        if stored < length:
            raise DamageError(f"a text of {length} bytes has {stored}")
        return self._block(start, length).decode()

    def _heap_objects(self, collection: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """(number, (start, bytes)) of the objects of one collection; number 0 is the free space behind them."""
        version, size = struct.unpack("<B3xQ", self._block(self._signed(b"GCOL", collection), 12))
        if version != 1 or size > _LONGEST_BYTES:
            raise DamageError(f"the heap at {collection} is of version {version} and has {size} bytes")
        place, end = collection + 16, collection + size
        while place + _HEAP_OBJECT.size <= end:
            number, _, stored = self._unpack(_HEAP_OBJECT, place)
            if number == 0:
                return
            yield number, (place + _HEAP_OBJECT.size, stored)
            place += _HEAP_OBJECT.size + -(-stored // 8) * 8

    def _place(self, item: _Object, kind: int, size: int) -> tuple[tuple[int, ...], int, int]:
        """(shape, address, bytes) of a contiguous dataset of elements of a kind and size."""
        dataspace, datatype, layout = (item.one(message) for message in (_DATASPACE, _DATATYPE, _LAYOUT))
        if (datatype[0] & 0x0F, struct.unpack_from("<I", datatype, 4)[0]) != (kind, size):
            raise DamageError("a dataset is of another type")
        version, layout_class, address, stored = struct.unpack_from("<BBQQ", layout)
        if (version, layout_class) != (3, _CONTIGUOUS) or dataspace[0] != 1:
            raise DamageError("a dataset is not contiguous")
        shape = struct.unpack_from(f"<{dataspace[1]}Q", dataspace, 8)
        if int(np.prod(shape, dtype=object)) * size != stored:
            raise DamageError(f"a dataset of {shape} elements has {stored} bytes")
        return shape, address, stored

    def _images(self, item: _Object) -> StoredImages:
        shape, address, stored = self._place(item, _INTEGER, 1)
        return StoredImages(shape, np.dtype(np.uint8), address, stored)

    def _values(self, item: _Object, dtype: str) -> np.ndarray:
        shape, address, stored = self._place(item, _INTEGER if dtype == "<i8" else _FLOAT, 8)
        return np.frombuffer(self._take(address, stored), dtype).reshape(shape)

    def _class_names(self, item: _Object) -> tuple[str, ...]:
        shape, address, stored = self._place(item, _VARIABLE_LENGTH, _HEAP_REFERENCE.size)
        content = self._take(address, stored)
        return tuple(self._text(content[16 * number :]) for number in range(shape[0]))

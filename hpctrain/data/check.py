"""Full check of a data file: damage with the affected samples, duplicates, and empty classes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.image_file import (
    ImageFile,
    Stored,
    changed_datasets,
    check_names,
    check_place,
    check_statistics,
    check_structure,
    read_contents,
)
from hpctrain.data.readers import BlockReader, sum_of

#: called with the number of samples that were just checked
Advance = Callable[[int], None]

_SHOWN = 20


@dataclass(frozen=True)
class FileFinding:
    """Finding about a data file.

    Attributes:
        kind: "changed", "unreadable", "undecodable", "decoder", "label", "contents", "duplicate", "duplicate across classes" or
            "empty class".
        damage: whether the file has changed or cannot be used for training.
        samples: numbers of the affected samples; empty if the finding is not about particular samples.
    """

    kind: str
    damage: bool
    sentence: str  # what was found, without a full stop
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckedFile:
    """Result of the check of one data file: its numbers of images and classes, and the findings."""

    path: Path
    images: int
    classes: int
    findings: tuple[FileFinding, ...]

    @property
    def damaged(self) -> bool:
        """Whether any finding reports damage."""
        return any(finding.damage for finding in self.findings)


def check_file(path: Path, threads: int = 1, advance: Advance = lambda count: None) -> CheckedFile:
    """Read a whole data file, decoding in `threads` threads, and return findings about damage, duplicates and empty classes.

    Raises:
        DataError: the file is missing, unreadable, or so damaged that its samples cannot be located or its classes named.
    """
    contents = read_contents(path)
    check_structure(path, contents)
    check_place(path, contents.images)
    check_names(path, contents.class_names)
    findings = list(_content_findings(path, contents))
    samples = _Samples(ImageFile.of(path, contents), contents, threads)
    findings += samples.check(advance)
    findings += _duplicates(samples)
    findings += _empty_classes(contents)
    return CheckedFile(path, len(contents.labels), len(contents.class_names), tuple(findings))


def _content_findings(path: Path, contents: Stored) -> Iterator[FileFinding]:
    """Yield findings about all contents other than the images."""
    changed = changed_datasets(contents)
    if changed:
        yield FileFinding("changed", True, f"{', '.join(changed)} changed since the file was written")
    classes = len(contents.class_names)
    wrong = np.flatnonzero((contents.labels < 0) | (contents.labels >= classes)).tolist()
    if wrong:
        label = int(contents.labels[wrong[0]])
        sentence = f"{_numbers(wrong)} a label outside 0..{classes - 1}, the first of them {label}"
        yield FileFinding(
            "label", True, sentence.replace(" a label", " has a label" if len(wrong) == 1 else " have labels"), tuple(wrong)
        )
    try:
        check_statistics("it", contents.mean, contents.std)
    except DataError as error:
        yield FileFinding("contents", True, str(error).rstrip("."))


class _Samples:
    """Samples of a file, and what reading them has shown; see `check`.

    Attributes:
        pixel_sums: (N,) crc32 of the pixels; 0 for samples that are not sound.
        sound: (N,) whether each sample is readable and unchanged.
    """

    def __init__(self, file: ImageFile, contents: Stored, threads: int) -> None:
        assert isinstance(file.pixels, BlockReader), "a file"
        self.file, self.reader = file, file.pixels
        changed = changed_datasets(contents)
        self._sums = None if "sums" in changed else contents.sums
        self._known_pixels = None if "pixel_sums" in changed else contents.pixel_sums
        self._decodes = contents.pixel_sums is not None
        self._threads, self._max_pixels, self._value_range = threads, contents.max_pixels, contents.value_range
        self.pixel_sums = np.zeros(len(file), np.uint32)
        self.sound = np.ones(len(file), bool)

    def check(self, advance: Advance) -> Iterator[FileFinding]:
        """Read all samples, and yield findings about damage."""
        digest = hashlib.sha256()
        unreadable: dict[int, str] = {}
        changed: list[int] = []
        undecodable: dict[int, str] = {}
        others: list[int] = []
        for numbers, block, failed in self.reader.blocks():
            digest.update(block.data)
            unreadable |= failed
            ends = np.cumsum(self.reader.extents.sizes(numbers)).tolist()
            stored = dict(zip(numbers.tolist(), map(slice, [0, *ends], ends), strict=False))
            sums = {sample: sum_of(block[place]) for sample, place in stored.items() if sample not in failed}
            wrong = [] if self._sums is None else [sample for sample, value in sums.items() if value != self._sums[sample]]
            changed += wrong
            self.sound[[*failed, *wrong]] = False
            if self._decodes:
                self._decode({sample: block[stored[sample]].tobytes() for sample in sums}, undecodable, others)
            else:
                self.pixel_sums[list(sums)] = list(sums.values())
            advance(len(numbers))
        if unreadable:
            yield FileFinding("unreadable", True, _with_reason(unreadable, "cannot be read"), tuple(unreadable))
        if changed:
            verb = "has" if len(changed) == 1 else "have"
            yield FileFinding("changed", True, f"{_numbers(changed)} {verb} changed since the file was written", tuple(changed))
        elif not unreadable and digest.hexdigest() != self.file.stored_digest:
            yield FileFinding(
                "changed",
                True,
                "images changed since the file was written; without checksums of samples, the affected ones are unknown",
            )
        if undecodable:
            yield FileFinding("undecodable", True, _with_reason(undecodable, "cannot be decoded"), tuple(undecodable))
        if others:
            verb = "decodes" if len(others) == 1 else "decode"
            sentence = f"{_numbers(others)} {verb} to other pixels with the libraries of this machine than when the file was made"
            yield FileFinding("decoder", True, sentence, tuple(others))

    def _decode(self, contents: dict[int, bytes], undecodable: dict[int, str], others: list[int]) -> None:
        """Decode picture files, by sample number; record pixel sums, failures, and samples that decode to other pixels."""
        from hpctrain.data.convert.common import PictureForm, in_order
        from hpctrain.data.decoding import Fit

        height, width, channels = self.file.shape
        fit: Fit = "squash" if self.file.fit == "squash" else "crop"
        form = PictureForm((height, width), fit, channels, max_pixels=self._max_pixels, value_range=self._value_range)

        def one(sample: int) -> int | str:
            try:
                return sum_of(form.picture(contents[sample], 0).pixels)
            except DataError as error:
                return str(error)

        for sample, result in zip(contents, in_order(one, contents, self._threads), strict=True):
            if isinstance(result, str):
                undecodable[sample] = result
                self.sound[sample] = False
                continue
            self.pixel_sums[sample] = result
            if self.sound[sample] and self._known_pixels is not None and result != self._known_pixels[sample]:
                others.append(sample)


def _duplicates(samples: _Samples) -> Iterator[FileFinding]:
    """Yield findings about samples with equal pixels, separately for duplicates within a class and across classes."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for sample in np.flatnonzero(samples.sound).tolist():
        groups[int(samples.pixel_sums[sample])].append(sample)
    labels = samples.file.labels
    within: list[list[int]] = []
    across: list[list[int]] = []
    for group in groups.values():
        for same in _same(samples, group) if len(group) > 1 else ():
            (within if len(set(labels[same].tolist())) == 1 else across).append(same)
    for kind, found, where in (
        ("duplicate", within, "within a class"),
        ("duplicate across classes", across, "in different classes"),
    ):
        if found:
            shown = "; ".join(", ".join(map(str, same[:_SHOWN])) for same in found[:_SHOWN])
            more = f"; and {len(found) - _SHOWN:,} more groups" if len(found) > _SHOWN else ""
            count = sum(map(len, found))
            sentence = f"{count:,} samples {where} have the same image as other samples: {shown}{more}"
            yield FileFinding(kind, False, sentence, tuple(sample for same in found for sample in same))


def _same(samples: _Samples, candidates: Sequence[int]) -> list[list[int]]:
    """Return the groups of two or more candidates with equal pixels."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for sample in candidates:
        groups[hashlib.sha256(np.ascontiguousarray(samples.reader[sample]).data).digest()].append(sample)
    return [group for group in groups.values() if len(group) > 1]


def _empty_classes(contents: Stored) -> Iterator[FileFinding]:
    labels, classes = contents.labels, len(contents.class_names)
    counts = np.bincount(labels[(labels >= 0) & (labels < classes)], minlength=classes)
    empty = [f"{label} ({contents.class_names[label]})" for label in np.flatnonzero(counts == 0).tolist()]
    if empty:
        shown = ", ".join(empty[:_SHOWN]) + (f", and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else "")
        noun, verb = ("class", "has") if len(empty) == 1 else ("classes", "have")
        yield FileFinding("empty class", False, f"{noun} {shown} {verb} no sample")


def _numbers(samples: Iterable[int]) -> str:
    """Return "sample 3" or "samples 3, 5, ..., and 7 more"."""
    numbers = list(samples)
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (f", and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else "")
    return f"sample{'' if len(numbers) == 1 else 's'} {shown}"


def _with_reason(why: dict[int, str], what: str) -> str:
    first = next(iter(why.values())).rstrip(".")
    return f"{_numbers(why)} {what}: {first}"

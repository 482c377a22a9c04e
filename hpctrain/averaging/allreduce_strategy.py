"""The base of strategies that sum each slice of the gradients by one allreduce and update everything on every rank."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from hpctrain.averaging import slice_sizes
from hpctrain.averaging.allreduce import AllreduceAverager
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.rounding import Rounding, words_of_rounding
from hpctrain.averaging.slice_sizes import Sizes
from hpctrain.averaging.slicing import Slice, fingerprint
from hpctrain.averaging.strategy import Strategy, words_of_shards
from hpctrain.comm.link import LinkModel
from hpctrain.comm.groups import Levels, levels


class AllreduceStrategy(Strategy):
    """One allreduce per slice, in backward's order. A strategy gives `words` and `slices`.

    Attributes:
        cuts_large: a very large slice travels in several operations, posted together.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS,)
    cuts_large: ClassVar[bool] = True

    @abstractmethod
    def words(self) -> str:
        """The strategy and its options, as a stored schedule names what it was made for: other words, another schedule."""

    @abstractmethod
    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Slices of all parameters, in forward order; each holds whole parameters.

        Args:
            link: what sizes follow from, as `sizes` says; None where they follow from none.
        """

    def least_elements(self, link: LinkModel | None) -> int:
        """Least elements of a bucket: by the option `bucket_bytes`, which the options must have, else as the link asks for.

        An allreduce has twice the steps and moves twice the bytes of a reduce-scatter, so the best size is the same.
        """
        size_bytes: int | None = self.options.bucket_bytes
        if size_bytes is None:
            size_bytes = slice_sizes.bucket_bytes(self.group.total_bytes, self.group.ranks, link)
        return max(1, size_bytes // self.group.layout.item_bytes)

    @property
    def sizes(self) -> Sizes | None:
        """How sizes that are not given are found; None where none follows from a link."""
        return getattr(self.options, "sizes", None)

    @property
    def levels(self) -> Levels | None:
        """The levels of sums in 16 bits, by the option `two_level`; all other sums are the MPI's allreduce, which knows nodes."""
        options = self.options
        in_levels = getattr(options, "two_level", False) and getattr(options, "wire", "float32") != "float32"
        return levels(self.group.nodes) if in_levels and self.group.nodes is not None else None

    @property
    def rounding(self) -> Rounding | None:
        rounding = super().rounding
        return None if rounding is None else replace(rounding, cuts_allreduces=self.cuts_large)

    def request(self) -> str:
        rounding, two = words_of_rounding(self.rounding), self.levels
        shards = words_of_shards(self.group.shards)
        return f"{self.words()}{shards}{rounding}; {fingerprint(self.group.layout)}{'' if two is None else two.words}"

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        return self.sizes == "measured" and usable is None

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(slice_sizes.RULE_LINK if self.sizes == "rule" else link)
        order = (Operation(OperationKind.ALLREDUCE, k, Stream.GRADIENTS) for k in reversed(range(len(slices))))
        return CollectiveSchedule(self.request(), self.group.ranks, slices, tuple(order), rounding=self.rounding)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return AllreduceAverager(setup, agreement, cuts_large=self.cuts_large)

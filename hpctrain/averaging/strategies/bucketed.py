"""Bucketed averaging: nonblocking allreduces of fused gradients in backward's order, as large as the link asks for."""

from __future__ import annotations

from hpctrain.averaging import planning
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.reduction import AllreduceAverager
from hpctrain.averaging.slices import Slice, fused
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Optimizer


class Bucketed(AllreduceAverager):
    """One allreduce for each bucket of neighbouring parameters, posted when the last of their gradients is ready.

    Args:
        bucket_bytes: Least size of a bucket, in bytes; null chooses it as `sizes` says.
        sizes: How sizes that are not given are found: "rule" takes the same ones in every run on as many ranks, so that runs
            repeat bit by bit; "measured" follows the link, which is measured at the start.

    Raises:
        ConfigError: bucket_bytes below 1, or given though sizes are to be measured.
    """

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
        bucket_bytes: int | None = None,
        sizes: planning.Sizes = "rule",
    ) -> None:
        super().__init__(group, optimizer, comm, progress, norms=norms)
        self._bucket_bytes = planning.check_optional("bucket_bytes", bucket_bytes)
        self._sizes = planning.check_sizes(sizes, "bucket_bytes", bucket_bytes)

    def _request(self) -> str:
        return f"bucketed, bucket_bytes {self._bucket_bytes}{planning.in_request(self._sizes)}"

    def _slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        size_bytes = self._bucket_bytes
        if size_bytes is None:
            assert link is not None
            # An allreduce has twice the steps and moves twice the bytes of a reduce-scatter: the ratio stays.
            size_bytes = planning.bucket_bytes(self.group.grad.nbytes, self.comm.size, link)
        return fused(self.group, max(1, size_bytes // self.group.grad.itemsize))

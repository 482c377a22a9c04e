"""A posted MPI operation, for the queues and for what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.comm.base import Array
from hpctrain.comm.lost_ranks import LostRanks
from hpctrain.comm.mpi_buffers import dtype_char

# The names of dtypes by their characters, at hand: an operation's text is made as it is posted.
_DTYPES = {char: np.dtype(char).name for char in "fdilqBH"}


class MpiHandle:
    """A posted MPI operation; holds its buffers until it is complete.

    Args:
        request: of MPI, as mpi4py has it.
        lost: is told of its begin and its end, and what MPI says of lost ranks; None: nobody asks.
    """

    __slots__ = ("_dtype", "_elements", "_lost", "_operation", "_request")

    def __init__(self, request: Any, operation: str, buffer: Array | None = None, lost: LostRanks | None = None) -> None:
        self._request, self._lost = request, lost
        self._operation = operation
        self._elements: int = 0 if buffer is None else buffer.size
        self._dtype: str = "" if buffer is None else dtype_char(buffer)
        if lost is not None:
            lost.begun(self)

    def test(self) -> bool:
        if self._lost is not None:
            return self._test_beside(self._lost)
        complete: bool = self._request.Test()
        return complete

    def _test_beside(self, lost: LostRanks) -> bool:
        """As `test`, where MPI goes on when a rank dies."""
        try:
            complete: bool = self._request.Test()
        except lost.error as error:
            lost.ended(self)
            lost.check(error)
            raise
        if complete:
            lost.ended(self)
        else:
            lost.polled()
        return complete

    def __str__(self) -> str:
        return f"{self._operation} of {self._elements} {_DTYPES[self._dtype]} elements" if self._dtype else self._operation

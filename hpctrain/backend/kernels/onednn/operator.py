"""The base of operators on the library's primitives: they say which kernels the library chose for them."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.backend.operators import Operator
from hpctrain.backend.onednn.binding import Primitive

FORWARD, BACKWARD, BACKWARD_DATA, BACKWARD_WEIGHTS = "forward", "backward", "backward data", "backward weights"


class LibraryOperator(Operator):
    """An operator whose work is done by primitives.

    primitives: by the phase that they compute; None where that phase is not asked for.
    """

    primitives: Mapping[str, Primitive | None]

    @property
    def plain_loops(self) -> tuple[str, ...]:
        """The phases that the library would compute by its plain loops, which are slow."""
        return tuple(phase for phase, primitive in self.primitives.items() if primitive is not None and primitive.is_plain)

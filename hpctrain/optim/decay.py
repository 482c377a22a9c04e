"""Weight decay: which parameters have it, and which values a configuration may give."""

from __future__ import annotations

import math
from typing import Literal, get_args

from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import Segment

DecayExclude = Literal["norm_and_bias", "none"]


def check_decay(weight_decay: float, decay_exclude: str) -> None:
    """Nothing, where both values are legal.

    Raises:
        OptionError: one of them is not.
    """
    if not (weight_decay >= 0.0 and math.isfinite(weight_decay)):
        sentence = f"weight_decay {weight_decay} must be a finite number of at least 0; the usual value is 1e-4."
        raise OptionError(sentence, "weight_decay")
    if decay_exclude not in get_args(DecayExclude):
        sentence = f"decay_exclude {decay_exclude!r} is unknown; it is one of {', '.join(get_args(DecayExclude))}."
        raise OptionError(sentence, "decay_exclude")


def is_excluded(segment: Segment, decay_exclude: str) -> bool:
    """True for a norm's parameters and biases, where `decay_exclude` leaves them out."""
    return decay_exclude == "norm_and_bias" and not segment.decay

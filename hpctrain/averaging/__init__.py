"""Averaging strategies, one a file."""

#: modules of this package that are no strategies; names that begin with "_" are never registered
NOT_REGISTERED = (
    "base",
    "exchange",
    "gate",
    "norms",
    "ownership",
    "planning",
    "reduction",
    "schedule",
    "sharding",
    "slices",
    "state",
    "timing",
)

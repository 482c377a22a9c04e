"""Optimisers and learning-rate schedules."""

#: modules of this package that are no optimisers; names that begin with "_" are never registered
NOT_REGISTERED = ("base", "schedules", "clip")

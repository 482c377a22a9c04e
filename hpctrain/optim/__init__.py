"""Optimisers and learning-rate schedules.

An optimiser updates the segments of a flat group that its rank owns, and never communicates. An averager owns the optimiser and
completes the norms that it needs. This package imports `nn`, `backend`, `trace` and the progress engine of `comm`; `averaging`
and the packages above it import this one. Read `base.py` first, then `optimizers.py`.
"""

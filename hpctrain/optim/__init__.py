"""Optimisers and learning-rate schedules.

An optimiser updates the segments of a flat group that its rank owns, and never communicates; an averager owns the optimiser and
completes the norms that it needs. This package imports `nn` and `backend`. Read `base.py` first, then `optimizers.py`.
"""

"""Optimisers and learning-rate schedules.

An optimiser updates the segments of a flat group that its rank owns, and never communicates; averagers own it and complete the
norms that it needs. Imports `nn` and `backend`. Read `base.py` first.
"""

"""Computation: specs of operations, kernel sets, which make operators from specs, and arithmetic outside of operators.

This package imports neither MPI nor any model; `nn`, `comm` and all packages above may import it. `backend/numpy` is the
reference, `backend/onednn` serves x86-64 processors, and `backend/cuda` serves GPUs. A set is imported when it is chosen
(`choice.py`). Read `specs.py` first, then `operators.py`, the interface between layers and arithmetic.
"""

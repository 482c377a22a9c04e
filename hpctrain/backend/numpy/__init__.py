"""The NumPy kernel set: the reference that others are tested against, in float32 and float64.

Imports the seam (`backend/*.py`) alone; `backend/onednn` takes its operators where oneDNN has none. Read `kernel_set.py`
first, then `operator.py`; each other module computes the operations that its name says.
"""

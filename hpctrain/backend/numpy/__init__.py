"""The NumPy kernel set: the reference for tests of the others, in float32 and float64.

It imports only the modules of `backend/` itself; `backend/onednn` uses its operators where oneDNN has none. Read `kernel_set.py`
first, then `operator.py`; each other module computes the operations that its name lists.
"""

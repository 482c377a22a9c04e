"""The NumPy kernel set: the reference for tests of the other sets, in float32, float64 and bfloat16.

It imports only the modules of `backend/` itself; `backend/onednn` uses its operators for operations that oneDNN lacks. Read
`kernel_set.py` first, then `operator.py`; each other module computes the operations that its name lists.
"""

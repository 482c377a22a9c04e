"""What computes: specs of operations, the operators that kernel sets make of them, and arithmetic outside of operators.

Knows no MPI and no model; `nn`, `comm` and all above may import it. `backend/numpy` is the reference, `backend/onednn` the set
for x86-64 processors, `backend/cuda` that for GPUs; the sets are imported when one of them is chosen (`choice.py`). Read
`specs.py` first, then `operators.py`, the seam between layers and arithmetic.
"""

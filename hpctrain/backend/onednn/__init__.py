"""The oneDNN kernel set: float32 on x86-64 processors with AVX2 or more, through ctypes.

Imports the seam (`backend/*.py`) and `backend/numpy`; `choice.py`, the doctor, `--version` and measurements import it. Read
`kernel_set.py` first, then `binding.py`, which is all of oneDNN's interface that is used.
"""

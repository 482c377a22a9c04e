"""The oneDNN kernel set: float32 on x86-64 processors with AVX2 or more, bfloat16 on those that multiply it, through ctypes.

It imports the modules of `backend/` itself and `backend/numpy`; `choice.py`, the doctor, `--version` and measurements import it.
Read `kernel_set.py` first, then `binding.py`, which contains all calls of oneDNN's C interface.
"""

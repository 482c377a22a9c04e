"""The CUDA kernel set: convolutions by cuDNN, matrix products by cuBLAS, all else by CUDA C of our own.

A `.cu` file stands next to the operator that launches it; `.cuh` files are shared. Only `cupy_device.py` imports CuPy, and
`choice.py`, `comm` and measurements import the set. Read `device.py` first, the waist between kernels and a GPU, then
`runtime.py` and `operator.py`.
"""

"""The CUDA kernel set: convolutions by cuDNN, matrix products by cuBLAS, and all other operations by hpctrain's CUDA C.

A `.cu` file is next to the operator that launches it; `.cuh` files are shared headers. Only `cupy_device.py` imports CuPy;
`choice.py`, `comm` and measurements import the set. Read `device.py` first, the interface between kernels and a GPU, then
`runtime.py` and `operator.py`.
"""

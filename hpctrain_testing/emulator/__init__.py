"""The emulated device: a CPU that runs the CUDA sources of `hpctrain.backend.cuda` as a GPU might.

An instrument of tests and benchmarks: hpctrain never imports it, it imports `hpctrain.backend` alone. Read `device.py` first,
then `streams.py`, which decides in which order work is done.
"""

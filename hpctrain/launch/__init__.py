"""This process, its launcher and its parent: signals, threads, streams, and how an end is reported.

Nothing here imports NumPy or mpi4py, so all of it may run before thread counts are set and MPI starts. Only `core` lies below.
Read `launcher.py` first, then `keeper.py`.
"""

"""This process, its launcher and its parent: signals, threads, streams, and how the end of a process is reported.

Nothing here imports NumPy or mpi4py, so all of it may run before thread counts are set and MPI starts. Of the other packages, it
imports only `core`. Read `launcher.py` first, then `keeper.py`.
"""

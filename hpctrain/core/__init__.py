"""Modules that all others may import, and that import nothing of hpctrain but each other: errors, text, files, logs, names.

`errors` has the exceptions, and `registry` the way from a name to an object. Everything here is loaded by every rank, many
modules
before NumPy and MPI: keep their imports few.
"""

"""Modules that all others may import, and that import nothing of hpctrain but each other: errors, text, files, logs, names.

`errors` has the exceptions, and `registry` the way from a name to an object. Read `errors` first. All modules but `console` are
loaded by every rank, many before NumPy and MPI: keep their imports few.
"""

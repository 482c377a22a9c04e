"""Modules that all other packages may import: errors, text, files, logs, registries. They import nothing else of hpctrain.

`errors` defines the exceptions, and `registry` finds an object by its name. Read `errors` first. Every rank loads all modules
except `console`, many of them before NumPy and MPI; keep their imports few.
"""

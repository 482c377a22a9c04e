"""Layers, their parameters, and the programs that run them on one rank.

The package contains no MPI and does not depend on ranks. It imports `backend` and the packages below it; packages from `models`
upwards may import it. `layers.py` describes a model, `compile` turns its graph into an execution plan, and `program.py` runs that
plan; `network.py` combines them. Read `layers.py` first.
"""

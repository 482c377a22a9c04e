"""Layers, their parameters, and the programs that run them on one rank.

The engine knows no MPI and no rank: it imports `backend` and what lies below it, and packages from `models` upwards may import
it. `layers.py` describes a model, `compile` turns its graph into an execution plan, and `program.py` runs that plan;
`network.py` puts them together. Read `layers.py` first.
"""

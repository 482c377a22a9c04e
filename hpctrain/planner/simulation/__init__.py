"""Simulation of a step by discrete events: the tasks of all ranks, the schedules of their averagers, cores and links.

`tasks.py` is the language of simulated steps; read the entry point, `simulate.py`, next. `processes.py` simulates ranks,
`operations.py` collectives, `transfers.py` messages, and `resources.py` shared resources.
"""

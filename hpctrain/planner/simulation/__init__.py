"""Simulation of a step by discrete events: the tasks of all ranks, the schedules of their averagers, cores and links.

Only the planner imports this package. Read its entry point, `simulate.py`, first. `processes.py` simulates ranks, `operations.py`
collectives, `transfers.py` messages, and `resources.py` shared resources.
"""

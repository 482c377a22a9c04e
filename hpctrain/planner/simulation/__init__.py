"""The simulation of a step by discrete events: the tasks of all ranks, the schedules of their averagers, cores and links.

Only the planner imports this package. Read `simulate.py`, its entry point, first. `processes.py` simulates ranks,
`operations.py` collectives, `transfers.py` messages, and `resources.py` shared resources.
"""

"""The simulation of a step by discrete events: the tasks of all ranks, the schedules of their averagers, cores and links.

`simulate.py` is the entrance and the file to read first; the planner alone imports from here. `processes.py` is a rank,
`operations.py` its collectives, `transfers.py` its messages, `resources.py` what they share.
"""

"""The costs of operators and messages on a machine: rates, measured times, and the stages of collectives.

Read `machine.py` first. `compute_costs.py` prices computation, `collective_costs.py` prices messages.
"""

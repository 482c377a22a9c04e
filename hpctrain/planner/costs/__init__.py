"""What a machine needs for operators and messages: machines, rates, measured times and collectives, without a job or a plan.

Read `machine.py` first. `compute_costs.py` prices computation, `collective_costs.py` prices messages.
"""

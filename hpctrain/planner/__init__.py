"""The planner: predicts the time of a step on a machine, and searches for the fastest grid, plan and averager.

Predictions need neither ranks nor arrays; measurements of a machine need both. Read `step_program.py` first: it builds a step as
data (`tasks.py`) and predicts its time. `search.py` compares candidates. The costs of messages are in `collective_costs.py`,
those of computation in `compute_costs.py`; a strategy declares its messages, which `averaging_costs.py` prices. `machine_file.py`
reads machines. A run imports the planner only if it plans or predicts.
"""

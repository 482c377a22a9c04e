"""The planner: predicts the cost of a step on a machine, and searches for the cheapest grid, plan and averager.

It computes before a job what a run would do. Predictions need no ranks and no arrays; measurements of a machine need both. Read
`step_program.py` first: it builds a step as data (`tasks.py`) and predicts it; `search.py` compares candidates. Costs come from
`collective_costs.py` and `compute_costs.py`, those of a strategy from the strategy (`averaging_costs.py` asks it), machines
from `machine_file.py`. A run imports the planner only if it plans or predicts.
"""

"""The planner: predicts the cost of a step on a machine, and searches for the cheapest grid, plan and averager.

It computes before a job what a run would do, without ranks and without arrays. Read `step_program.py` first: it builds a
step as data (`tasks.py`) and predicts it; `search.py` compares candidates. Costs come from `collective_costs.py` and
`compute_costs.py`, machines from `machine_file.py`. Commands and runs import the planner only if they plan or predict.
"""

"""The planner: predicts what a step costs on a machine, and searches the grid, plan and averager that cost least.

It computes before a job what a run would do, without ranks and without arrays. Read `step_program.py` first: it builds a
step as data (`tasks.py`) and predicts it; `search.py` compares candidates. Costs come from `collective_costs.py` and
`compute_costs.py`, machines from `machine_file.py`. Training, runs and commands import it, and load it only where something is
planned or predicted.
"""

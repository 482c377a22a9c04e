"""The planner, which predicts the time of a step on a machine, and searches for the fastest grid, plan and averager.

Predictions need neither ranks nor arrays; measurements of a machine need both. Each part imports only those before it: `costs`,
`job.py`, `simulation`, `program`, `planned_run.py`, `search`, `measure`. Read `program/step_program.py` first: it builds a step
as data and predicts its time. A run imports the planner only if it plans or predicts.
"""

"""The planner, which predicts the time of a step on a machine, and searches for the fastest grid, plan and averager.

A grid has Pr x Pc ranks. Rank (r, c), at position c * Pr + r, shares samples with the other ranks of its split group, which have
the same c, and holds the same parts of parameters as the ranks of its data group, which have the same r, its split rank.

Predictions need neither ranks nor arrays; measurements of a machine need both. Each part imports only those before it: `costs`,
`job.py`, `simulation`, `program`, `planned_run.py`, `search`, `measure`. Read `program/step_program.py` first: it builds a step
as data and predicts its time. A run imports the planner only if it plans or predicts.
"""

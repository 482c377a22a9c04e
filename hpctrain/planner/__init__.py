"""The planner: what a step costs on a machine, simulated before the job, and the grid, plan and averager that cost least."""

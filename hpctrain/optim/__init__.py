"""Optimisers and learning-rate schedules: a new one is a new file in `optimizers/` or `schedules/`."""

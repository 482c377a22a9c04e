"""Averaging of gradients over ranks: strategies plan the operations of a step, averagers run them.

Imports `nn`, `optim`, `comm` and what lies below. Read `base.py` first (`Strategy`, `GradientAverager` and the order of their
calls), then `collective_schedule.py` (what a plan is) and `reduce_scatter.py` (the default strategy's base and its averager).
"""

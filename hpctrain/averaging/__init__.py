"""Averaging of gradients over ranks: strategies plan the operations of a step, averagers run them.

This package imports `nn`, `optim`, `comm` and the packages below. Read `base.py` first (`Strategy`, `GradientAverager` and the
order of their calls), then `collective_schedule.py` (the plan of a step), `reduce_scatter.py` (the averager of the default
strategy) and `reduce_scatter_strategy.py` (the base of that strategy).
"""

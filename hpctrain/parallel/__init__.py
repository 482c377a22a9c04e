"""Layers split over the ranks of a split group: by samples, by weights (output channels), or by images.

`sharding_rules.py` determines how one operation runs on all ranks. `partition_graph.py` makes each rank's graph and inserts
`moves.py` between different layouts, and `rank_graph.py` makes a rank's network. This package imports `nn`, `comm` and the
packages below; `training` and the packages above it import it. Read `parallel_plan.py` first, then `sharding_rules.py`.
"""

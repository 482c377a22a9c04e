"""Layers split over the ranks of a split group: by samples, by weights (output channels), or by images.

`sharding_rules.py` says how one operation runs on all ranks, `partition_graph.py` makes each rank's graph of it and inserts
`moves.py` where layouts differ, and `rank_graph.py` makes a rank's network. Imports `nn` and `comm`; `planner`, `train` and
what lies above import it. Read `parallel_plan.py` first, then `sharding_rules.py`.
"""

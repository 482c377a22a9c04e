"""`hpctrain doctor`: decide whether a training would run well here. Facts are gathered on every rank and judged on rank 0.

Checks are in `ranks.py`, `nodes.py` and `files.py`. Read `check.py` first, then `job.py`.
"""

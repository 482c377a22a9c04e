"""`hpctrain doctor`: check whether a training would run well here. Every rank gathers facts, and rank 0 judges all of them.

Checks are in `ranks.py`, `nodes.py` and `files.py`. Read `check.py` first, then `job.py`.
"""

"""Measurements for users: one network, the data pipeline, and scaling over ranks.

The commands of `hpctrain bench` and the developers' programs in `benchmarks/` import this package. Read `engine.py` first.
"""

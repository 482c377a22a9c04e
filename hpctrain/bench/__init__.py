"""Measurements that users make: one network, the data on their way to a batch, and scaling over ranks.

The commands of `hpctrain bench` and the developers' programs in `benchmarks/` import it. Read `engine.py` first;
`interleaved.py` runs processes in turn, so that measurements can be compared.
"""

"""Averaging strategies by name: one module per strategy, found by its file name.

A module defines one subclass of `hpctrain.averaging.base.Strategy`, its options and costs and, if needed, its averager.
`bucketed.py` is the shortest example with options. The registry imports these modules by name; only tests and other
strategies import them directly.
"""

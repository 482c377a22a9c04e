"""Averaging strategies by name: one module per strategy, found by its file name.

A module defines one subclass of `hpctrain.averaging.base.Strategy`, its options and, where it needs one, its own averager.
`bucketed.py` is the shortest complete example. Nothing outside of tests imports these modules: the registry finds them by
name.
"""

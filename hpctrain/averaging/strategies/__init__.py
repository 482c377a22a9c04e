"""Averaging strategies by name: one module per strategy, found by its file name.

A module defines one subclass of `hpctrain.averaging.base.Strategy`, its options and costs and, if it needs one, its own averager.
`bucketed.py` is the shortest example with options. Only tests import these modules: the registry finds them by name.
"""

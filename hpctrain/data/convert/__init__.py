"""Converters: one module for each kind of files that a data file is made from.

`common` has what they share; the commands below `hpctrain data convert` import the one that they need.
"""

"""Converters: one module for each kind of files that a data file is made from.

`common` has what they share; read it first. The commands below `hpctrain data convert`, and the modules of `data` that read
pictures, import the one that they need.
"""

"""Converters: one module for each kind of source that a data file is made from.

`common` has the shared parts; read it first. The commands below `hpctrain data convert`, and the modules of `data` that read
pictures, import the converter that they need.
"""

"""Directories of runs: who may write to one, its files, and the records in it.

`directory` lists the files of a run and reads most of them; read it first. `owner` proves that a directory is a run and lets
one job at a time write to it; `records` has the files that grow with a run. Nothing here communicates: one rank writes, and the
others receive paths. Packages from `train` upwards may import this package; it imports `storage` and below.
"""

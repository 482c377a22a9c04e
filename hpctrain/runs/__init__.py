"""Run directories: ownership, files and records.

`directory` lists the files of a run and reads most of them; read it first. `owner` proves that a directory is a run and lets one
job at a time write to it. `records` has the files that grow during a run. Nothing here communicates: one rank writes, and the
others receive paths. Packages from `training` upwards may import this package. It imports `storage` and below.
"""

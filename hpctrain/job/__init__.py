"""Started ranks of a job: their session, checks that they start alike, and the ownership of their run.

`session` turns a process into a rank with a grid and a progress engine; most of its methods are collective. Packages from `run`
upwards may import this package. Read `session` first, then `same_start`.
"""

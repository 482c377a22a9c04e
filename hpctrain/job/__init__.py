"""The started ranks of a job: who they are, whether they start alike, and what outlives ranks that are lost.

`session` makes a process a rank with a grid and a progress engine; most methods are collective. Packages from `run` upwards may
import this package. Read `session` first, then `same_start`.
"""

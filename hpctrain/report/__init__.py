"""Reports on runs: an HTML page with curves, the time of a step, events, checkpoints and the configuration.

`hpctrain.runs` reads the run directories. Read `page.py` first.
"""

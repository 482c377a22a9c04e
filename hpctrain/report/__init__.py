"""Reports of runs that people look at: one page with curves, where the time went, what happened, and what was configured.

What a run's directory tells is read by `hpctrain.runs`. Read `page.py` first.
"""

"""The search for the fastest grid, plan, averager and number of micro-batches.

`search.py` compares candidates, after `estimates.py` has bounded their times layer by layer. `configured_search.py` connects a
search with configurations, and simulates how a training scales.
"""

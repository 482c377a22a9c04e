"""Checks that users call on their own layers, models and kernel operators.

`layers.py` checks the gradients of a layer in a network, `operators.py` those of one operator in hostile memory. Nothing in
hpctrain imports this package; it imports `nn`, `models` and `backend`. Read `layers.py` first.
"""

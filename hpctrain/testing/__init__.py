"""Checks for users' own layers, models and kernel operators.

`layers.py` checks the gradients of a layer in a network, `operators.py` those of a single operator on poisoned memory. hpctrain
does not import this package; it imports `nn`, `models` and `backend`. Read `layers.py` first.
"""

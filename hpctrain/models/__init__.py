"""Models by name, and their weights in the layouts of other frameworks.

Each module of `families` is one model with its variants, built of the layers of `nn`; `catalogue.py` finds them by name and
checks their options. Read `families/vgg.py` first, then `parts.py`, which the families share.
"""

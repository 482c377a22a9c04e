"""Models by name, and their weights in the layouts of other frameworks.

Each module of `families` is one model with its variants, built from the layers of `nn`. `catalogue.py` finds models by name and
checks their options. This package imports `nn`, `backend` and `storage`; `assembly` and the packages above it import it. Read
`families/vgg.py` first, then `parts.py`, which the families share.
"""

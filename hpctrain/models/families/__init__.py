"""Model families: each module is one, under its own name; no other module lies here.

A module has a function `build`, whose keywords are the model's options, IMAGE_SHAPE (height, width and channels of the images
that it is meant for), and VARIANTS, names that stand for some of the options. `vgg.py` is a good first one to read.
"""

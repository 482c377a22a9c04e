"""Model families. Each module is one family with the module's name; no other modules belong here.

A module has a function `build`, whose keywords are the model's options. Options with the same meaning in all families are
`classes` (number of logits), `channels_in` (channels of the images), `epsilon`, `momentum` and `synchronised` (see `BatchNorm`),
and `seed` (see `Dropout`). IMAGE_SHAPE is (height, width, channels) of the images that the model is designed for. VARIANTS maps
further names to the options that they fix. `models.catalogue` imports the families by name. Read `vgg.py` first.
"""

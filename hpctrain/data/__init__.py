"""Training data: the file format, its readers and writers, and the steps from stored pixels to batches.

A sample goes from `image_file` (the format and open data files) through `readers` (stored bytes, disk errors), `cache` (memory
shared by a node) and `pipeline` (augmentation, normalisation) into the batches of `loader`. `sampler` determines the samples of a
step. Read `image_file` first, then `loader`. `augmentations` and `convert` have one file for each augmentation and each source of
images. This package does not depend on networks. It imports `backend`, the shared memory of `comm`, `storage` and `launch`;
packages from `runs` upwards may import it.
"""

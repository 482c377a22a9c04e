"""Training data: the file format, its readers and writers, and what turns stored pixels into batches.

A sample goes from `image_file` (an open data file) through `readers` (bytes, errors of a disk), `cache` (memory of a node) and
`pipeline` (augmentation, normalisation) into the batches of `loader`; `sampler` determines the samples of a step. Read `format`
first, then `loader`. The package knows no network; it imports `backend`, shared memory of `comm`, `storage` and `launch`, and
packages from `runs` upwards may import it. `augmentations` and `convert` have one file for each augmentation and each source of
images.
"""

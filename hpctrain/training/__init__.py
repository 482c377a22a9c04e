"""Training on one rank: the replica, a step, the training loop, evaluation, and checks of values.

`replica` joins network, optimiser and averagers. `step` runs one step of a replica, and `trainer` repeats it until the last
epoch. Read them in this order. `snapshot` converts a replica into the tensors of a checkpoint and back. `finiteness` detects
values that are not finite, and `weight_watch` detects flipped bits. Packages from `assembly` upwards may import this one. `run`
builds its objects from a configuration.
"""

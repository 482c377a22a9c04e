"""Training on one rank: replica, step, loop, evaluation, and what watches them.

`replica` puts network, optimiser and averagers together, `step` runs one step of it, and `trainer` repeats that to the last
epoch; read them in this order. `snapshot` turns a replica into the tensors of a checkpoint and back; `finiteness` and
`weight_watch` find values that are not finite and bits that have flipped. Packages from `config` upwards may import this one,
and `run` assembles its objects from a configuration.
"""

"""Files that are whole or not there: atomic writes, checkpoints, and files of weights.

Everything that writes a file uses `atomic_write`; read it first. `checkpoint` writes, reads, lists and deletes checkpoints in
terms of plain arrays; `shards` and `hdf5_store` are its file formats. The package knows no network, no ranks and no
communicator, and imports `launch`, `config` and `core` at most.
"""

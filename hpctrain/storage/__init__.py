"""Files that are whole or not there: atomic writes, checkpoints, and files of weights.

A file that is written whole is written by `atomic_write`; read it first. Files that grow are appended to elsewhere.
`checkpoint` writes, reads, lists and deletes checkpoints in terms of plain arrays; `shards` and `hdf5_store` are its file
formats. The package knows no network, no ranks and no communicator; it imports `launch` and `core`, and all packages from
`backend` upwards may import it.
"""

"""Atomic writes, checkpoints, and weight files of other frameworks.

`atomic_write` writes a file completely or not at all; read it first. Files that grow are appended to in other packages.
`checkpoint` writes, reads, lists and deletes checkpoints in terms of plain arrays; `hdf5_store` is the format of one file, and
`shards` that of a directory of files. The package does not depend on networks, ranks or communicators. It imports `launch` and
`core`; all packages from `backend` upwards may import it.
"""

"""The command line. Commands parse options, call what lies below, and print.

`main.py` names the module of each command, and `failure.py` is the one place where an exception becomes text. Modules of
commands import nothing heavy at the top, as `hpctrain --help` loads them all. Modules of tables import rich, and are loaded by
commands that print. Read `main.py` first, and `start.py` for what runs before MPI starts, in which order. Only `api` and
`__main__` import this package.
"""

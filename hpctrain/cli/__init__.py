"""The command line. Commands parse options, call the packages below, and print the results.

`main.py` lists the module of each command. Modules of commands import nothing heavy at the top, as `hpctrain --help` loads them
all. Modules of tables import rich, and are loaded by commands that print. Read `main.py` first, and then `process/start.py`, the
order of everything before MPI starts. Only `__main__` imports this package.
"""

"""Communication between ranks: communicators, their operations and the progress engine that drives them.

Imports `backend`, `flight`, `launch`, `trace` and `core`, and knows no model, layer or parameter; packages from `averaging`
upwards, and `data`, import it. Read `base.py` first (the protocol that every communicator implements), then `progress.py` (the
only place that waits) and `order.py` (the one law of order across communicators). `mpi.py` alone imports mpi4py.
"""

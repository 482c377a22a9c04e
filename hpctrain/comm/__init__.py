"""Communication between ranks: communicators, their operations and the progress engine that drives them.

Imports `backend`, `flight`, `launch`, `trace` and `core`, and does not depend on models, layers or parameters. `data`,
`averaging` and the packages above them import it. Read `base.py` first (the protocol that every communicator implements), then
`progress.py` (the only place that waits) and `order.py` (the rule for the order across communicators). Only `mpi.py` imports
mpi4py.
"""

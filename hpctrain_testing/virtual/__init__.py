"""Virtual ranks: threads of one process with MPI's meaning, scheduled promptly, adversarially or by a modelled clock.

Imports `hpctrain.comm` and `hpctrain.core` only. Read `run.py` first (`run_virtual` starts ranks), then `communicator.py`.
"""

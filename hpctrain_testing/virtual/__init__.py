"""Virtual ranks: threads of one process with the semantics of MPI, scheduled promptly, adversarially or by a modelled clock.

This package imports only `hpctrain.comm` and `hpctrain.core`. Read `run.py` first (`run_virtual` starts ranks), then
`communicator.py`.
"""

"""Instruments of hpctrain's own tests and benchmarks, and of tests of averaging strategies. hpctrain never imports them.

`virtual` runs many ranks as threads of one process, `emulator` runs GPU kernels on the host, `run` starts jobs of several ranks,
`lab` builds hosts with shaped links on one machine, `faults` puts faults into jobs, `formulas` has closed-form costs of papers,
`torch_parity`, `torch_networks` and `torchvision_models` have the same models in PyTorch. This is a separate distribution: `pip
install ./hpctrain_testing`.
"""

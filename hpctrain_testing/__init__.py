"""Instruments of hpctrain's own tests and benchmarks, and of tests of averaging strategies: never imported by hpctrain.

`virtual` runs many ranks as threads of one process, `emulator` computes a GPU's kernels on the host, `formulas` has closed forms
of papers, `torch_parity` and `torchvision_models` have the same models in PyTorch. It is a distribution of its own:
`pip install ./hpctrain_testing`.
"""

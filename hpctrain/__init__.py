"""hpctrain: convolutional networks trained on supercomputers over MPI.

Importing this package imports nothing heavy: no NumPy, no MPI (thread counts must be set before NumPy loads).
"""

from hpctrain.version import __version__ as __version__

"""hpctrain: convolutional networks trained on supercomputers over MPI.

The names below are what training from Python needs (docs/python-api.md). Importing this package imports nothing heavy, no NumPy
and no MPI; a name's module is imported when the name is first used.
"""

from __future__ import annotations

from hpctrain.version import __version__ as __version__

# Not from `typing`, whose import takes longer than all else here: until the program is read, a signal ends it without a word.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpctrain.api import model as model
    from hpctrain.api import schedule as schedule
    from hpctrain.api import start as start
    from hpctrain.errors import DivergedError as DivergedError
    from hpctrain.errors import HpctrainError as HpctrainError
    from hpctrain.experiment.job import Job as Job
    from hpctrain.experiment.network_choice import Automatic as Automatic
    from hpctrain.nn.layer import Layer as Layer
    from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool as AdaptiveAveragePool
    from hpctrain.nn.layers.average_pool import AveragePool as AveragePool
    from hpctrain.nn.layers.batch_norm import BatchNorm as BatchNorm
    from hpctrain.nn.layers.conv2d import Conv2d as Conv2d
    from hpctrain.nn.layers.dropout import Dropout as Dropout
    from hpctrain.nn.layers.flatten import Flatten as Flatten
    from hpctrain.nn.layers.linear import Linear as Linear
    from hpctrain.nn.layers.max_pool import MaxPool as MaxPool
    from hpctrain.nn.layers.relu import ReLU as ReLU
    from hpctrain.nn.layers.residual import Residual as Residual
    from hpctrain.nn.layers.sequential import Sequential as Sequential
    from hpctrain.train.metrics import RunningSums as RunningSums
    from hpctrain.train.replica import Replica as Replica

#: name -> the module that has it
_HOMES = {
    "model": "hpctrain.api",
    "schedule": "hpctrain.api",
    "start": "hpctrain.api",
    "DivergedError": "hpctrain.errors",
    "HpctrainError": "hpctrain.errors",
    "Job": "hpctrain.experiment.job",
    "Automatic": "hpctrain.experiment.network_choice",
    "Layer": "hpctrain.nn.layer",
    "AdaptiveAveragePool": "hpctrain.nn.layers.adaptive_average_pool",
    "AveragePool": "hpctrain.nn.layers.average_pool",
    "BatchNorm": "hpctrain.nn.layers.batch_norm",
    "Conv2d": "hpctrain.nn.layers.conv2d",
    "Dropout": "hpctrain.nn.layers.dropout",
    "Flatten": "hpctrain.nn.layers.flatten",
    "Linear": "hpctrain.nn.layers.linear",
    "MaxPool": "hpctrain.nn.layers.max_pool",
    "ReLU": "hpctrain.nn.layers.relu",
    "Residual": "hpctrain.nn.layers.residual",
    "Sequential": "hpctrain.nn.layers.sequential",
    "RunningSums": "hpctrain.train.metrics",
    "Replica": "hpctrain.train.replica",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""hpctrain: training of convolutional networks on supercomputers over MPI.

The names below are the Python API (docs/python-api.md). Importing this package imports nothing heavy, neither NumPy nor MPI; the
module of a name is imported when the name is first used.
"""

from __future__ import annotations

from hpctrain.version import __version__ as __version__

# Not from `typing`, whose import takes longer than the rest of this module: until signals are blocked, one ends the process
# without a message.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpctrain.api import model as model
    from hpctrain.api import schedule as schedule
    from hpctrain.api import start as start
    from hpctrain.api import train as train
    from hpctrain.core.errors import DivergedError as DivergedError
    from hpctrain.core.errors import HpctrainError as HpctrainError
    from hpctrain.nn.layers import AdaptiveAveragePool as AdaptiveAveragePool
    from hpctrain.nn.layers import AveragePool as AveragePool
    from hpctrain.nn.layers import BatchNorm as BatchNorm
    from hpctrain.nn.layers import Conv2d as Conv2d
    from hpctrain.nn.layers import Dropout as Dropout
    from hpctrain.nn.layers import Flatten as Flatten
    from hpctrain.nn.layers import Layer as Layer
    from hpctrain.nn.layers import Linear as Linear
    from hpctrain.nn.layers import MaxPool as MaxPool
    from hpctrain.nn.layers import ReLU as ReLU
    from hpctrain.nn.layers import Residual as Residual
    from hpctrain.nn.layers import Sequential as Sequential
    from hpctrain.run.automatic_search import Automatic as Automatic
    from hpctrain.run.python_job import Job as Job
    from hpctrain.run.result import TrainingResult as TrainingResult
    from hpctrain.training.metrics import RunningSums as RunningSums
    from hpctrain.training.replica import Replica as Replica

#: name -> module that defines it
_HOMES = {
    "model": "hpctrain.api",
    "schedule": "hpctrain.api",
    "start": "hpctrain.api",
    "train": "hpctrain.api",
    "DivergedError": "hpctrain.core.errors",
    "HpctrainError": "hpctrain.core.errors",
    "Job": "hpctrain.run.python_job",
    "TrainingResult": "hpctrain.run.result",
    "Automatic": "hpctrain.run.automatic_search",
    "Layer": "hpctrain.nn.layers",
    "AdaptiveAveragePool": "hpctrain.nn.layers",
    "AveragePool": "hpctrain.nn.layers",
    "BatchNorm": "hpctrain.nn.layers",
    "Conv2d": "hpctrain.nn.layers",
    "Dropout": "hpctrain.nn.layers",
    "Flatten": "hpctrain.nn.layers",
    "Linear": "hpctrain.nn.layers",
    "MaxPool": "hpctrain.nn.layers",
    "ReLU": "hpctrain.nn.layers",
    "Residual": "hpctrain.nn.layers",
    "Sequential": "hpctrain.nn.layers",
    "RunningSums": "hpctrain.training.metrics",
    "Replica": "hpctrain.training.replica",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

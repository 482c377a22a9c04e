"""Optimisers: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.core.registry import Registry
from hpctrain.optim.base import Optimizer

OPTIMIZERS: Registry[Optimizer] = Registry(__name__, "optimizer", Optimizer)

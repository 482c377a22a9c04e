"""Arena bytes of the networks that benchmarks time, planned without memory: `python -m tests.support.arena_sizes onednn`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from hpctrain.backend.choice import make_backend
from hpctrain.bench.engine_step import workload
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.network import Lowering

_NETWORKS = (("resnet50", 8, 224), ("vgg16", 4, 224), ("resnet34", 12, 48), ("resnet20", 64, 32), ("small", 32, 28))


def arena_sizes(backend: str) -> dict[str, list[int]]:
    """network -> bytes of [training, evaluation]."""
    kernels = make_backend(backend).kernels
    sizes = {}
    for name, batch, pixels in _NETWORKS:
        task = workload(name, batch, pixels)
        model = catalogue.build(task.model, task.options)
        graph = Lowering(model).graph(task.batch, (task.pixels, task.pixels, task.channels))
        sizes[f"{name}-{pixels}"] = [compile_graph(graph, kernels, training=training).arena_bytes for training in (True, False)]
    return sizes


def arena_sizes_with(instruction_set: str) -> Mapping[str, list[int]]:
    """The same of the oneDNN set, in a process whose library takes at most these instructions, on one thread."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instruction_set, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.arena_sizes", "onednn"]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    sizes: Mapping[str, list[int]] = json.loads(ended.stdout)
    return sizes


if __name__ == "__main__":
    print(json.dumps(arena_sizes(sys.argv[1])))

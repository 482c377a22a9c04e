"""The values of a configuration that do not go with the same bits on any number of ranks, each with its sentence."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.schema import Config
from hpctrain.core.yaml_source import KeyPath
from hpctrain.train.passes import backend_fault, split_fault, statistics_fault

_THREADS_FAULT = (
    "threads is auto, which shares out a node's cores among its ranks, but with exact all runs need the same number of threads "
    "per rank, as kernels may add in another order on another number; set threads to the number that a rank has in every run, "
    "such as 1."
)


def exact_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each value that `exact` does not take; those of averagers are found where these are made."""
    if config.exact.shards is None:
        return
    for section in config.automatic:
        yield (section,), _open_fault(section)
    if config.backend == "cuda":
        yield ("backend",), backend_fault("cuda")
    if config.threads == "auto":
        yield ("threads",), _THREADS_FAULT
    synchronised = config.batch_norm.statistics == "synchronised"
    faults = {
        ("grid", "rows"): split_fault(config.grid.rows),
        ("batch_norm", "statistics"): statistics_fault(["batch_norm.statistics"]) if synchronised else None,
    }
    for path, sentence in faults.items():
        if sentence is not None:
            yield path, sentence


def _open_fault(section: str) -> str:
    """The sentence that refuses a section whose values would follow from the number of ranks."""
    return f"{section} is auto, which chooses by the ranks, but exact.shards asks for the same bits on any; write {section} out."

"""The ranks of `overlap.py`: one job that steps all strategies in turn and measures each.

Started by `overlap.py` as `python -m mpi4py -m benchmarks.overlap_ranks SETTINGS`. All strategies share one network, so they
compute on the same memory; each has its own communicator, optimiser and buffers, and is drained when its turn ends.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process import be_nice, busy_seconds, cpu_seconds, sent_bytes
from benchmarks.shapes import Shape, made_up_batch
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.choice import make_backend
from hpctrain.backend.specs import LinearSpec
from hpctrain.comm import mpi
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import ProcessGrid, levels, node_numbers
from hpctrain.comm.progress import ProgressEngine, ProgressMode
from hpctrain.data.loader import Batch, LoaderRank
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator

PEER_KINDS = ("ddp", "compute-only")
_LR = 1e-4
_MOST_CALLS = mpi._MOST_CALLS
_LINK_BYTES = 64 << 20  # of the message that measures the link
_LINK_TRIALS = 3
_POLL_SECONDS = 300e-6  # between two looks at a bare operation: what it costs the core, without the price of spinning
_PEER_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """The request of `overlap.py`.

    variants: name -> (averager, its options); None: only the local update. rounds: turns of each. lead: untimed steps at the
    start of a turn, which fill the pipeline of strategies whose messages travel under the next forward. steps: timed steps.
    warmup: untimed steps before all turns, in which some strategies measure times to order their messages.
    peers: sockets of PyTorch's ranks, in rank order; empty: no peer. progress: progress mode.
    nice: niceness of the ranks and the peers. out: JSON file, written by rank 0.
    """

    shape: dict[str, Any]
    kernels: str
    variants: dict[str, tuple[str, dict[str, Any]] | None]
    rounds: int
    out: str
    lead: int = 1
    steps: int = 1
    warmup: int = 6
    peers: list[str] = field(default_factory=list)
    progress: str = "test"
    nice: int = 0
    deadline_seconds: float = 120.0


@dataclass
class Variant:
    """One strategy, ready to step.

    Attributes:
        lead, steps: untimed and timed steps of a turn.
        calls: maximum number of MPI calls of a test; 0: as usual.
    """

    replica: Replica
    batch: Batch
    counters: Counters
    mode: ProgressMode
    warmup: int
    lead: int
    steps: int
    calls: int = 0


class Turns:
    """A rank of a job whose variants step in turn, and PyTorch's rank next to it. Every method is collective."""

    def __init__(self, deadline_seconds: float) -> None:
        self._begin = time.perf_counter()
        self.world = mpi.world(deadline_seconds)
        self.progress = ProgressEngine(rank=self.world.rank, deadline_seconds=deadline_seconds, abort=self.world.abort)
        self.bare_comm = self._split("bare")
        self.peer: Peer | None = None

    def _split(self, name: str) -> Communicator:
        comm = self.world.split(0, self.world.rank, name)
        assert comm is not None
        return comm

    def say(self, what: str) -> None:
        """A line on rank 0's stderr: how far the job has come, where it ends early."""
        if self.world.rank == 0:
            print(f"{time.perf_counter() - self._begin:7.1f} s  {what}", file=sys.stderr, flush=True)

    def barrier(self) -> None:
        self.progress.wait(self.progress.queue(self.bare_comm).post(self.bare_comm.ibarrier, "barrier"))

    def turn(self, variant: Variant) -> dict[str, float]:
        """One turn of one strategy: seconds, exposed waits, CPU seconds and bytes of a step.

        The timed steps start and end with the previous step's messages on their way, so what such a strategy leaves to the next
        forward is paid for; bytes are those of the whole turn.
        """
        self._apply(variant)
        self.barrier()
        sent, counted = sent_bytes(), variant.counters.snapshot()
        for _ in range(variant.lead):
            self._step(variant)
        busy, begin, cpu, waited = busy_seconds(), time.perf_counter(), cpu_seconds(), self.progress.waited_seconds
        for _ in range(variant.steps):
            self._step(variant)
        seconds = time.perf_counter() - begin
        cpu, waited, busy = cpu_seconds() - cpu, self.progress.waited_seconds - waited, busy_seconds() - busy
        self._settle(variant)
        steps = variant.lead + variant.steps
        since = variant.counters.since(counted)
        exchanged = since.total().exchanged_bytes - since.total("messages").exchanged_bytes
        return {
            "step_seconds": seconds / variant.steps,
            "waited_seconds": waited / variant.steps,
            "cpu_seconds": cpu / variant.steps,
            "busy_seconds": busy / variant.steps,  # of the machine: more than all ranks' where other programs run
            "link_bytes": (sent_bytes() - sent) / steps,
            "payload_bytes": exchanged / steps,
        }

    def _apply(self, variant: Variant) -> None:
        self.progress.set_mode(variant.mode)
        mpi._MOST_CALLS = variant.calls or _MOST_CALLS

    def _settle(self, variant: Variant) -> None:
        variant.replica.drain()
        variant.replica.settle()
        self.barrier()
        self.progress.set_mode(ProgressMode.NONE)

    def warm_up(self, variant: Variant) -> float:
        """Steps that are not measured: set-up, and whatever a strategy measures by itself. Return the seconds of the last one."""
        self._apply(variant)
        for _ in range(variant.warmup):
            begin = time.perf_counter()
            self._step(variant)
        seconds = time.perf_counter() - begin
        self._settle(variant)
        return seconds

    def _step(self, variant: Variant) -> None:
        variant.replica.step(variant.batch, _LR)

    def all_rounds(self, turns: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, list[dict[str, float]]]:
        """All turns; the order within a round moves on by one each time, so that no variant always comes after the same one."""
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        names = list(turns)
        for number in range(rounds):
            at = number % len(names)
            self.say(f"round {number + 1} of {rounds}")
            for name in names[at:] + names[:at]:
                measured[name].append(turns[name]())
        return measured

    def peer_turn(self, kind: str, lead: int, steps: int) -> dict[str, float]:
        """The peer's turn; this rank sleeps meanwhile."""
        assert self.peer is not None
        self.barrier()
        found = self.peer.turn(kind, lead, steps)
        self.barrier()
        return found


class Rank(Turns):
    """All that one rank measures."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.deadline_seconds)
        self.settings = settings
        self.shape = Shape(**settings.shape)
        side = self.shape.pixels
        self.network = Network(
            catalogue.build(self.shape.family, self.shape.options), (side, side, 3), make_backend(settings.kernels).kernels
        )
        place: LoaderRank = {"rank": self.world.rank, "ranks": self.world.size, "split_size": 1, "tiles": None, "shards": None}
        self.batch = made_up_batch(self.shape, place)
        self.nodes = node_numbers(self.world, self.world.split_shared_memory("node"))
        self._own_part = np.zeros(self.network.groups["all"].size, np.float32)
        self.mode = ProgressMode(settings.progress)
        self.variants = {name: self._variant(name, choice) for name, choice in settings.variants.items()}
        self.peer = Peer(settings.peers[self.world.rank]) if settings.peers else None

    def _variant(self, name: str, choice: tuple[str, dict[str, Any]] | None) -> Variant:
        counters = Counters()
        groups = GridGroups(ProcessGrid(CountingCommunicator(self.world, counters), 1, self.world.size))
        if choice is None:  # one rank's blocking averaging is the local update, whole
            choice, groups = ("blocking", {}), groups.alone()
        averager, options = choice
        replica = Replica(
            self.network,
            groups=groups,
            progress=self.progress,
            strategy=AveragerChoice(averager, options).strategy,
            optimizer=partial(Sgd, momentum=0.9),
            nominal_batch=self.batch.global_count,
        )
        replica.agree()
        # Where nothing travels under a kernel, no look is needed: not under the compute that all others are compared with either.
        mode = ProgressMode.NONE if averager == "blocking" else self.mode
        asked, _, calls = name.partition("@")[2].partition("+")
        mode = ProgressMode(asked) if asked else mode
        # Orders that follow from measurements need their steps; for all others two make connections and buffers.
        warmup = self.settings.warmup if hasattr(replica.strategies["all"].options, "replan") else 2
        lead, steps = self.settings.lead, self.settings.steps
        return Variant(replica, self.batch, counters, mode, warmup, lead, steps, int(calls or 0))

    def bare(self, exchanged: int) -> dict[str, float]:
        """A bare reduce-scatter and allgather in which each rank exchanges `exchanged` bytes; its CPU time and its duration.

        The rank sleeps between looks, so that the CPU time is that of the messages and of the sum, not of the waiting.
        """
        ranks = self.world.size
        part = exchanged // (2 * (ranks - 1) * 4)
        counts = [part] * ranks
        whole, own = self.network.groups["all"].grad[: part * ranks], self._own_part[:part]
        self.barrier()
        begin, cpu = time.perf_counter(), cpu_seconds()
        for post in (
            partial(self.bare_comm.ireduce_scatter, whole, own, counts),
            partial(self.bare_comm.iallgather, None, whole, counts),
        ):
            handle = post()
            while not handle.test():
                time.sleep(_POLL_SECONDS)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        self.barrier()
        return {"seconds": seconds, "cpu_seconds": cpu}

    def link_bytes_per_second(self) -> float:
        """The rate of a large message from rank 0 to the last rank, alone on the link; on rank 0."""
        buffer = np.ones(_LINK_BYTES, np.uint8)
        comm, last = self.bare_comm, self.world.size - 1
        rates = []
        for _ in range(_LINK_TRIALS):
            self.barrier()
            begin = time.perf_counter()
            if self.world.rank == 0:
                self.progress.wait_handle(comm.isend(buffer, last, 1), "link")
            elif self.world.rank == last:
                self.progress.wait_handle(comm.irecv(buffer, 0, 1), "link")
            self.barrier()
            rates.append(buffer.size / (time.perf_counter() - begin))
        return float(np.median(rates))

    def allreduce_seconds(self) -> dict[str, float]:
        """Allreduce of all gradients, nonblocking and polled as `blocking` does it, and MPI's own blocking call."""
        from mpi4py import MPI

        grad = self.network.groups["all"].grad
        found: dict[str, list[float]] = {"polled": [], "own": []}
        for _ in range(_LINK_TRIALS):
            for kind in found:
                self.barrier()
                begin = time.perf_counter()
                if kind == "polled":
                    self.progress.wait_handle(self.bare_comm.iallreduce(grad), "allreduce")
                else:
                    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, grad)
                found[kind].append(time.perf_counter() - begin)
        grad[...] = 0
        return {kind: float(np.median(seconds)) for kind, seconds in found.items()}

    def formula_bytes(self, parties: int) -> dict[str, int]:
        """Bytes that each of `parties` ranks exchanges in a step by formula: of gradients, and with factors where these are less.

        With n words of a layer and P ranks: 2 (P-1)/P n; for the inputs, errors and weights of a layer of K inputs and M outputs
        at b samples a rank (P-1)/P (K b + M b P + K M). In two levels a node sends what one rank of as many as nodes would.
        """
        samples = self.batch.global_count
        gradients = 2 * self.network.groups["all"].size
        factors = float(gradients)
        for node in self.network.graph(1).nodes:
            if isinstance(node.spec, LinearSpec):
                roles = node.parameters
                k, m = self.network.parameters[roles["weight"]].spec.shape
                whole = 2 * sum(self.network.parameters[name].size for name in roles.values())
                factors += min(0, k * samples / parties + m * samples + k * m - whole)
        return {kind: round(4 * n * (parties - 1) / parties) for kind, n in (("gradients", gradients), ("factors", factors))}


class Peer:
    """PyTorch's rank next to this one."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PEER_SECONDS)
        give_up = time.monotonic() + _PEER_SECONDS
        while True:  # it is there once its set-up has ended
            try:
                self._socket.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)
        self._stream = self._socket.makefile("rw")
        self.facts: dict[str, Any] = self._read()

    def turn(self, kind: str, lead: int, steps: int) -> dict[str, float]:
        self._stream.write(json.dumps({"kind": kind, "lead": lead, "steps": steps}) + "\n")
        self._stream.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise ConnectionError("PyTorch's rank has ended.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(rank: Rank) -> dict[str, Any]:
    """The facts of the job and all rounds."""
    payloads = rank.formula_bytes(rank.world.size)
    for name, variant in rank.variants.items():
        rank.say(f"warm-up of {name}")
        rank.warm_up(variant)
    for size in payloads.values():
        rank.bare(size)
    rank.say("link")
    facts = _facts(rank, payloads)
    turns: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(rank.turn, variant) for name, variant in rank.variants.items()
    }
    if rank.peer is not None:
        lead, steps = rank.settings.lead, rank.settings.steps
        turns |= {f"peer {kind}": partial(rank.peer_turn, kind, lead, steps) for kind in PEER_KINDS}
    turns |= {f"bare {kind}": partial(rank.bare, size) for kind, size in payloads.items()}
    return {"facts": facts, "rounds": rank.all_rounds(turns, rank.settings.rounds)}


def mean_over_ranks(all_ranks: list[Mapping[str, list[dict[str, float]]]]) -> dict[str, list[dict[str, float]]]:
    """The ranks' measurements of the same turn, averaged: one that starts its timed steps late ends them early."""
    return {
        name: [
            {key: float(np.mean([of_rank[name][number][key] for of_rank in all_ranks])) for key in turn}
            for number, turn in enumerate(turns)
        ]
        for name, turns in all_ranks[0].items()
    }


def _facts(rank: Rank, payloads: dict[str, int]) -> dict[str, Any]:
    two_level = levels(rank.nodes)
    return {
        "payload_bytes": payloads,
        "wire_bytes": payloads if two_level is None else rank.formula_bytes(two_level.nodes),
        "parameters": rank.network.groups["all"].size,
        "link_bytes_per_second": rank.link_bytes_per_second(),
        "allreduce_seconds": rank.allreduce_seconds(),
        "ranks": rank.world.size,
        "mpi": mpi.describe(),
        "progress": str(rank.mode),
        "peer": None if rank.peer is None else rank.peer.facts,
    }


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    settings = Settings(**json.loads(Path(path).read_text()))
    be_nice(settings.nice)
    rank = Rank(settings)
    found = measure(rank)
    everyone = rank.world.allgather_object(found["rounds"])
    if rank.world.rank == 0:
        result = {"settings": asdict(settings), "facts": found["facts"], "rounds": mean_over_ranks(everyone)}
        Path(settings.out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

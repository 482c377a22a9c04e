"""The measurements of `overlap.py` as tables: how near each strategy comes to the limit, and what it hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pairs import Interval, interval, paired, ratio

SHARED_MEMORY = "shared memory"  # in place of a rate
Rounds = dict[str, list[dict[str, float]]]
_PEER = "peer ddp"
_PEER_ALONE = "peer compute-only"


class Analysis:
    """The figures of one run at one bandwidth; each is a median over rounds of what was measured in the same round.

    limit = max(compute-only + c, wire): c is the CPU time of the bare operations of as many bytes, wire those bytes over the
    measured rate of the link (where hosts have several ranks: the bytes that leave a host in two levels). The cheapest
    strategy's bytes, unless it says "own".
    """

    def __init__(self, run: dict[str, Any]) -> None:
        self._rounds: Rounds = run["rounds"]
        facts = run["facts"]
        self.rate: float = facts["link_bytes_per_second"]
        self.parameters: int = facts["parameters"]
        self.payload: dict[str, int] = facts["payload_bytes"]
        self._wire_bytes: dict[str, int] = facts.get("wire_bytes", self.payload)
        self.cheapest = min(self.payload, key=lambda kind: self.payload[kind])
        self.names = [name for name in self._rounds if not name.startswith(("bare ", "peer "))]
        variants = run["settings"]["variants"]
        self._exchanging = {name for name, choice in variants.items() if choice and choice[1].get("fc_exchange") == "auto"}
        self.has_peer = _PEER in self._rounds
        self._shaped = run["rate"] != SHARED_MEMORY  # memory has no wire to hide

    def column(self, name: str, key: str = "step_seconds") -> list[float]:
        """One figure of all rounds."""
        return [turn[key] for turn in self._rounds[name]]

    def step(self, name: str) -> Interval:
        """Seconds."""
        return interval(self.column(name))

    def wire_seconds(self, kind: str) -> float:
        """The payload's time on the wire, of "gradients" or "factors"."""
        return self._wire_bytes[kind] / self.rate

    def kind(self, name: str) -> str:
        """The payload that a strategy sends."""
        return "factors" if name in self._exchanging else "gradients"

    def limit(self, kind: str) -> Interval:
        """Seconds."""
        wire = self.wire_seconds(kind)
        return paired(lambda alone, cost: max(alone + cost, wire), self._alone, self._cost(kind))

    def limit_share(self, name: str, kind: str) -> Interval:
        """limit / step: 1 is the goal."""
        wire = self.wire_seconds(kind)
        return paired(lambda alone, cost, step: max(alone + cost, wire) / step, self._alone, self._cost(kind), self.column(name))

    def hidden(self, name: str) -> Interval:
        """1 - (step - compute-only - c) / min(compute-only, wire), with the strategy's own bytes."""
        kind = self.kind(name)
        wire = self.wire_seconds(kind)
        return paired(
            lambda alone, cost, step: 1 - (step - alone - cost) / min(alone, wire),
            self._alone,
            self._cost(kind),
            self.column(name),
        )

    def speedup(self, name: str, over: str) -> Interval:
        """Throughput over another's."""
        return ratio(self.column(over), self.column(name))

    def against_peer(self, name: str) -> Interval:
        """(step - own compute-only) over the peer's: below 1 is better than the peer."""
        return paired(
            lambda step, own, theirs, their_own: (step - own) / max(theirs - their_own, 1e-9),
            self.column(name),
            self._alone,
            self.column(_PEER),
            self.column(_PEER_ALONE),
        )

    def link_over_payload(self, name: str) -> float | None:
        """Bytes that the link carried over those handed to the communicator; None where either is 0."""
        carried, handed = interval(self.column(name, "link_bytes")).median, interval(self.column(name, "payload_bytes")).median
        return carried / handed if carried and handed else None

    def figures(self, name: str) -> dict[str, Interval]:
        """The figures of one strategy by name."""
        found = {"step_seconds": self.step(name)}
        if name == "compute-only":
            return found
        found["limit_share"] = self.limit_share(name, self.cheapest)
        found["own_limit_share"] = self.limit_share(name, self.kind(name))
        if self._shaped:
            found["hidden"] = self.hidden(name)
        found["over_blocking"] = self.speedup(name, "blocking")
        if self.has_peer:
            found["over_ddp"] = self.speedup(name, _PEER)
            found["exposed_over_ddp"] = self.against_peer(name)
        return found

    @property
    def _alone(self) -> list[float]:
        return self.column("compute-only")

    def _cost(self, kind: str) -> list[float]:
        return self.column(f"bare {kind}", "cpu_seconds")


_COLUMNS: dict[str, str] = {
    "step_seconds": "step, s",
    "limit_share": "limit / step",
    "own_limit_share": "own limit / step",
    "hidden": "hidden",
    "over_blocking": "over blocking",
    "over_ddp": "over DDP",
    "exposed_over_ddp": "exposed / DDP's",
}
_ROW = "{:<22}" + " {:>22}" * len(_COLUMNS) + " {:>8}"


def report(result: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """Print a result: per bandwidth the wire, the limit and a row per strategy."""
    shape = result["shape"]
    say(f"{result['model']}: {shape}")
    say(f"{result['machine']}")
    for run in result["runs"]:
        _report_run(run, say)


def _report_run(run: dict[str, Any], say: Callable[[str], None]) -> None:
    found, facts = Analysis(run), run["facts"]
    rounds = len(found.column("blocking"))
    say(f"\n{run['rate']}: {facts['ranks']} ranks, {run['settings']['kernels']} kernels, {facts['mpi']}, {rounds} rounds")
    say(f"  link {8 * found.rate / 1e9:.3f} Gb/s, {found.parameters:,} parameters, allreduce alone {_allreduce(facts)}")
    say(f"  progress {facts['progress']}")
    for kind in found.payload:
        bare = interval(found.column(f"bare {kind}", "seconds"))
        cost = interval(found.column(f"bare {kind}", "cpu_seconds"))
        say(
            f"  {kind}: {found.payload[kind] / 1e6:.1f} MB per rank and step, wire {found.wire_seconds(kind):.3f} s, "
            f"bare operations {bare} s, c {cost} s, limit {found.limit(kind)} s"
        )
    say(_ROW.format("", *_COLUMNS.values(), "link"))
    for name in found.names:
        figures = found.figures(name)
        link = found.link_over_payload(name)
        cells = [str(figures[key]) if key in figures else "" for key in _COLUMNS]
        say(_ROW.format(name, *cells, "" if link is None else f"{link:.3f}"))
    if found.has_peer:
        for name in (_PEER, _PEER_ALONE):
            say(_ROW.format(name, str(found.step(name)), *[""] * (len(_COLUMNS) - 1), ""))
        peer = facts["peer"]
        say(f"  peer: PyTorch {peer['torch']}, {peer['memory_format']}, {peer['parameters']:,} parameters")


def markdown(result: dict[str, Any]) -> str:
    """A result as a table for a document: medians with their intervals."""
    lines = []
    for run in result["runs"]:
        found = Analysis(run)
        columns = {key: title for key, title in _COLUMNS.items() if any(key in found.figures(name) for name in found.names)}
        kinds = ", ".join(
            f"{found.wire_seconds(kind):.3f} s ({kind}, limit {found.limit(kind).median:.3f} s)" for kind in found.payload
        )
        lines += [f"{result['model']}, {run['rate']}, {8 * found.rate / 1e9:.3f} Gb/s measured, wire {kinds}:", ""]
        lines += ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
        for name in found.names:
            figures = found.figures(name)
            lines.append(f"| {name} | " + " | ".join(str(figures[key]) if key in figures else "" for key in columns) + " |")
        if found.has_peer:
            for name in (_PEER, _PEER_ALONE):
                lines.append(f"| {name} | {found.step(name)} |" + " |" * (len(columns) - 1))
        lines.append("")
    return "\n".join(lines)


def _allreduce(facts: dict[str, Any]) -> str:
    seconds = facts["allreduce_seconds"]
    return f"{seconds['polled']:.3f} s polled, {seconds['own']:.3f} s in MPI's blocking call"

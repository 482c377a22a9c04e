"""Faults put into small jobs: how each ends, after how long, and whether the rank and the place are named.

python -m benchmarks.faults                  # all; some minutes
python -m benchmarks.faults SIGKILL slow     # those with one of these words in their name; printed, not kept
python -m benchmarks.faults --device hpctrain_testing.emulator:7   # on backend cuda, with such a device on each rank
python -m benchmarks.faults --report         # Markdown of the file of results; runs nothing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.bench.machine import machine_facts
from hpctrain.storage.atomic_write import write_json
from hpctrain_testing.faults import DEADLINE_SECONDS, FAULTS, RANKS, Fault, findings, is_named, prepare, run_fault
from hpctrain_testing.lab import Lab, missing, take_down_at_termination
from hpctrain_testing.run import clean_environment

OUT = Path(__file__).resolve().parent / "results" / "faults.json"
#: that a job may take beyond its deadline, with its start
_LONGEST_SECONDS = DEADLINE_SECONDS + 10.0
_START_SECONDS = 30.0
_HANGS = {"ends": False, "seconds": None, "code": None, "named": False, "said": "it hangs"}
CUT_LINK = "a link cut between two hosts"


def measure_cut_link() -> dict[str, Any]:
    """How a job on two hosts ends whose link is cut after its first steps; seconds count from then on."""
    take_down_at_termination()
    with tempfile.TemporaryDirectory() as name, Lab(2, "1gbit") as lab:
        folder = Path(name)
        prepare(folder)
        keys: dict[str, object] = {"data.train": folder / "train.h5", "data.test": folder / "train.h5", "output": folder / "runs"}
        keys |= {
            "epochs": 100_000,
            "evaluate.every_epochs": 0,
            "checkpoint.every_epochs": 0,
            "deadline_seconds": DEADLINE_SECONDS,
        }
        train = ["-m", "mpi4py", "-m", "hpctrain", "train", str(folder / "faulty.yaml"), *(f"{key}={keys[key]}" for key in keys)]
        printed = folder / "printed"
        with (
            open(printed, "w") as file,
            subprocess.Popen(
                lab.mpiexec([sys.executable, *train]), env=clean_environment(), cwd=folder, stdout=file, stderr=subprocess.STDOUT
            ) as process,
        ):
            _until(lambda: " step " in printed.read_text(), _START_SECONDS)
            begin = time.monotonic()
            lab.cut(1)
            try:
                code = process.wait(DEADLINE_SECONDS + 2 * _START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return dict(_HANGS)
        seconds = time.monotonic() - begin
        sentences = findings(folder)["findings"]
        assert isinstance(sentences, list)
        report = next((text for text in sentences if "as where a link is cut" in text), "")
        return {"ends": True, "seconds": seconds, "code": code, "named": bool(report) and code != 0, "said": report}


def _until(reached: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "the job does not start"
        time.sleep(0.1)


def measure(fault: Fault, device: str | None = None) -> dict[str, Any]:
    """How a job with a fault ends, on the host or with a device on each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        try:
            outcome = run_fault(fault, folder, device=device)
        except subprocess.TimeoutExpired:
            return dict(_HANGS)
        report = findings(folder)
        sentences = report["findings"]
        assert isinstance(sentences, list)
        named = is_named(fault, outcome, report)
        sentence = next((line for line in outcome.output.splitlines() if any(words in line for words in fault.words)), "")
        sentence = next((text for text in sentences if any(words in text for words in fault.words)), sentence)
        sentence = sentence.replace(name, "FOLDER")
        return {"ends": True, "seconds": outcome.seconds, "code": outcome.code, "named": named, "said": sentence}


def markdown(results: dict[str, Any]) -> str:
    """A table of the faults, and how many were named."""
    lines = ["| fault | ends after, s | exit code | named | by |", "|---|---|---|---|---|"]
    faults = results["faults"]
    for name, values in faults.items():
        seconds = "never" if values["seconds"] is None else f"{values['seconds']:.1f}"
        code = "" if values["code"] is None else values["code"]
        lines.append(f"| {name} | {seconds} | {code} | {'yes' if values['named'] else 'no'} | {values['said']} |")
    ended = sum(values["ends"] and values["seconds"] <= _LONGEST_SECONDS for values in faults.values())
    named = sum(values["named"] for values in faults.values())
    lines += ["", f"{ended} of {len(faults)} ended within {_LONGEST_SECONDS:g} s of their start, {named} were named rightly."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run faults, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="faults with one of these words in their name; by default all")
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    parser.add_argument("--device", help="run on backend cuda, with this device on each rank; leaves the cut link out")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if chosen.report:
        print(markdown(json.loads(chosen.out.read_text())))
        return 0
    faults = [fault for fault in FAULTS if not chosen.words or any(word in fault.name for word in chosen.words)]
    results: dict[str, Any] = {"machine": machine_facts(), "ranks": RANKS, "deadline_seconds": DEADLINE_SECONDS, "faults": {}}
    for fault in faults:
        results["faults"][fault.name] = measure(fault, chosen.device)
        print(f"{fault.name}: {results['faults'][fault.name]}", flush=True)
    if chosen.device is not None:
        results["device"] = chosen.device
    elif (reason := missing()) is not None:
        print(f"{CUT_LINK}: left out. {reason}")
    elif not chosen.words or any(word in CUT_LINK for word in chosen.words):
        results["faults"][CUT_LINK] = measure_cut_link()
    if not chosen.words:
        write_json(chosen.out, results)
    print(markdown(results))
    return 0 if all(values["ends"] for values in results["faults"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""All ranks start alike, or none does: the first difference in one sentence, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from hpctrain.comm.base import Communicator
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment import same_start
from hpctrain.experiment.same_start import Subject, called_with, check_same_program, check_same_start, compare, package_files
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.cli.test_starting import folder as folder
from tests.support.jobs import Outcome

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def _sentences(overrides: list[list[str]], **leads: Any) -> list[str]:
    """The sentence that each rank raises; "" where it raises nothing. overrides: by rank."""

    def program(comm: ThreadCommunicator) -> str:
        config, _ = load(CONFIG, overrides[comm.rank])
        try:
            check_same_start(comm, config, leads_node=leads.get("leads_node", True))
        except ConfigError as error:
            return str(error)
        return ""

    return run_virtual(len(overrides), program)


@pytest.mark.parametrize("leads_node", [True, False])
def test_ranks_that_start_alike_go_on(leads_node: bool) -> None:
    assert _sentences([["batch=32"]] * 3, leads_node=leads_node) == ["", "", ""]
    assert _sentences([["threads=1"], ["threads=2"], ["flight=/tmp/x"]]) == ["", "", ""]


def test_another_configuration_is_named_on_every_rank() -> None:
    sentences = _sentences([["batch=32"], ["batch=32"], ["batch=64", "seed=3"]])
    assert set(sentences) == {
        "Rank 2 has another configuration than rank 0: batch is 64, not 32; give all ranks the same file and overrides."
    }
    options = _sentences([["averager={name: sharded}"], ["averager={name: sharded, wire: bfloat16}"]])
    assert "averager.wire is bfloat16, not none" in options[0]


def test_another_option_of_the_command_is_named() -> None:
    def program(comm: ThreadCommunicator) -> None:
        check_same_start(comm, None, options={"resume": True, "steps": 5})
        with pytest.raises(ConfigError, match="Rank 1 has other options than rank 0: resume is False, not True"):
            check_same_start(comm, None, options={"resume": comm.rank == 0, "steps": 5})

    run_virtual(2, program)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("software_versions", "Rank 1 has other packages than rank 0: numpy is 2, not 1; give all nodes the same environment."),
        ("package_files", "Rank 1 has other files of hpctrain than rank 0: nn/x.py differs; install the same version of it on"),
    ],
)
def test_other_packages_and_files_are_named(monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    calls = iter(range(2))
    values = [{"numpy": "1"}, {"numpy": "2"}] if kind == "software_versions" else [{"nn/x.py": 1}, {"nn/x.py": 2}]
    monkeypatch.setattr(same_start, kind, lambda *_: values[next(calls)])
    monkeypatch.setattr(same_start, "_DRIVERS", ())
    sentences = _sentences([[], []])
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(words)


def _program_sentences(arguments: list[dict[str, Any]], programs: list[Path | None]) -> list[str]:
    def program(comm: ThreadCommunicator) -> str:
        try:
            check_same_program(comm, arguments[comm.rank], programs[comm.rank])
        except ConfigError as error:
            return str(error)
        return ""

    return run_virtual(len(programs), program)


def test_programs_are_compared_by_arguments_and_text(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name / "train.py" for name in ("a", "b", "c"))
    for path, text in ((one, "x = 1"), (same, "x = 1"), (other, "x = 2")):
        path.parent.mkdir()
        path.write_text(text)
    alike = [{"batch": 8}] * 3
    assert _program_sentences(alike, [one, same, one]) == [""] * 3
    assert _program_sentences(alike, [None] * 3) == [""] * 3
    sentence = "Rank 2 has another program than rank 0: train.py differs; give all nodes the same file."
    assert _program_sentences(alike, [one, same, other]) == [sentence] * 3
    sentence = "Rank 1 has other arguments of hpctrain.start than rank 0: batch is 9, not 8; give all ranks the same."
    assert _program_sentences([{"batch": 8}, {"batch": 9}, {"batch": 8}], [one] * 3) == [sentence] * 3


def test_calls_are_compared_by_arguments() -> None:
    def program(comm: ThreadCommunicator) -> None:
        compare(comm, called_with("job.replica", {"seed": 0, "path": f"of rank {comm.rank}", "optimizer": program}))
        with pytest.raises(ConfigError, match=r"Rank 2 has other arguments of .*replica than rank 0: seed is 2, not 0"):
            compare(comm, called_with("job.replica", {"seed": comm.rank // 2 * 2}))

    run_virtual(3, program)


def test_checksums_are_of_all_modules(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("x = 1\n")
    (tmp_path / "c.txt").write_text("no module\n")
    before = package_files(tmp_path)
    (tmp_path / "a" / "b.py").write_text("x = 2\n")
    assert list(before) == ["a/b.py"]
    assert before != package_files(tmp_path)


def test_parts_that_no_training_loads_are_not_read() -> None:
    names, of_gpus = (package_files(Path(hpctrain.__file__).parent, of_gpus=of_gpus) for of_gpus in (False, True))
    assert {"nn/program.py", "experiment/run.py", "version.py"} <= names.keys()
    assert {"backend/cuda/cudnn_graphs.py", "backend/kernels/cuda/conv2d.py"} <= of_gpus.keys()
    assert not names.keys() & of_gpus.keys()
    aside = ("doctor/", "virtual/", "backend/cuda/emulator/")
    assert not any(name.startswith(aside) for name in (*names, *of_gpus))


@pytest.mark.parametrize("differ", [False, True])
def test_modules_of_gpus_are_compared_between_the_nodes_that_have_some(differ: bool) -> None:
    """Rank 1 is on a node without a GPU, and says nothing of them."""

    def program(comm: Communicator) -> str:
        files = {"backend/cuda/x.py": comm.rank if differ else 0}
        mend, of_gpus = "install the same version of it on all nodes", None if comm.rank == 1 else files
        try:
            for facts in ({"nn/x.py": 0}, of_gpus):
                compare(comm, Subject("other files of hpctrain", mend, facts, lambda key, *_: f"{key} differs"))
        except ConfigError as error:
            return str(error)
        return ""

    sentence = "Rank 2 has other files of hpctrain than rank 0: backend/cuda/x.py differs; "
    sentence += "install the same version of it on all nodes."
    assert run_virtual(3, program) == [sentence if differ else ""] * 3


@pytest.mark.job
def test_a_job_whose_ranks_were_asked_for_different_things_is_refused(job: Callable[..., Outcome], folder: Path) -> None:
    program = """
import os, runpy, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
sys.argv = ["hpctrain", "train", "tiny.yaml", f"seed={rank}"]
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""
    outcome = job(2, ["-c", program], cwd=folder)
    assert outcome.code != 0
    assert len(re.findall("has another configuration than rank 0: seed is 1, not 0", outcome.stderr)) == 1
    assert not (folder / "runs").exists()

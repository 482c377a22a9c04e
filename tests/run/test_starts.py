"""Starts: all ranks have the same configuration, inputs and code, or none of them starts."""

import importlib
import io
import re
import threading
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import hpctrain
from hpctrain.comm.base import Communicator
from hpctrain.config.load import load
from hpctrain.core import user_code
from hpctrain.core.errors import ConfigError, DataError, HpctrainError
from hpctrain.data.convert.common import PictureForm, pack
from hpctrain.data.image_file import ImageFile, digest_of
from hpctrain.data.pictures import picture_facts
from hpctrain.data.readers import BlockReader
from hpctrain.data.writer import write_data_file
from hpctrain.doctor import ranks as rank_checks
from hpctrain.doctor.check import OwnPlace
from hpctrain.job import same_start
from hpctrain.job.same_start import (
    Subject,
    called_with,
    check_same_code,
    check_same_program,
    check_same_start,
    compare,
    compared_facts,
    is_trusted,
    package_files,
)
from hpctrain.job.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.signals import SignalWatch
from hpctrain.optim.optimizers import Sgd
from hpctrain.run import resume
from hpctrain.run.automatic_search import StartedJob, choose
from hpctrain.run.evaluation import PredictionRequest, judge, run_evaluation, run_prediction
from hpctrain.run.images import open_alike
from hpctrain.run.python_job import Job, LoopCheckpoints
from hpctrain.run.resume import find_checkpoint, read_together
from hpctrain.run.training import TrainingRequest, run_training
from hpctrain.runs.directory import latest
from hpctrain.storage import checkpoint
from hpctrain.training.replica import Replica
from hpctrain_testing.run import Outcome
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support import nets
from tests.support.doctored import view
from tests.support.newest_checkpoint import write_shards
from tests.support.run_in_process import prepare, train
from tests.support.runs import _session
from tests.support.sampling import amount

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def said(ranks: int, work: Callable[[Communicator], object]) -> list[str]:
    """Return the sentence that each virtual rank raises, "" for a rank that raises none."""

    def program(comm: Communicator) -> str:
        try:
            work(comm)
        except HpctrainError as error:
            return str(error) if error.reported_by == 0 else f"not known to be raised alike: {error}"
        return ""

    return run_virtual(ranks, program, deadline_seconds=60)


def _started(overrides: Sequence[Sequence[str]], leads_node: bool = True) -> list[str]:
    """What ranks raise that start with these overrides."""
    configs = [load(CONFIG, each)[0] for each in overrides]
    return said(len(configs), lambda comm: check_same_start(comm, configs[comm.rank], leads_node=leads_node))


@pytest.mark.parametrize("leads_node", [True, False])
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([["batch=32"]] * 3, ""),
        ([["threads=1"], ["threads=2"], ["flight=/tmp/x"]], ""),
        (
            [["batch=32"], ["batch=32"], ["batch=64", "seed=3"]],
            "Rank 2 has another configuration than rank 0: batch is 64, not 32",
        ),
        ([["averager=sharded"], ["averager={name: sharded, wire: bfloat16}"]], "averager.wire is bfloat16, not none"),
    ],
)
def test_ranks_start_with_one_configuration_or_not_at_all(overrides: list[list[str]], sentence: str, leads_node: bool) -> None:
    [found] = set(_started(overrides, leads_node))
    assert sentence in found
    assert found == "" or (sentence and found.endswith("; give all ranks the same file and overrides."))


def test_another_option_of_the_command_or_argument_of_a_call_is_named() -> None:
    def program(comm: ThreadCommunicator) -> None:
        check_same_start(comm, None, options={"resume": True, "steps": 5})
        with pytest.raises(ConfigError, match="Rank 1 has other options than rank 0: resume is False, not True"):
            check_same_start(comm, None, options={"resume": comm.rank != 1, "steps": 5})
        compare(comm, called_with("job.replica", {"seed": 0, "path": f"of rank {comm.rank}", "optimizer": program}))
        with pytest.raises(ConfigError, match=r"Rank 2 has other arguments of .*replica than rank 0: seed is 2, not 0"):
            compare(comm, called_with("job.replica", {"seed": comm.rank // 2 * 2}))

    run_virtual(3, program)


@pytest.mark.parametrize(
    ("kind", "fact", "words"),
    [
        ("software_versions", "numpy", "packages than rank 0: numpy is 2, not 1; give all nodes the same environment."),
        ("package_files", "nn/x.py", "files of hpctrain than rank 0: nn/x.py differs; install the same version of hpctrain on"),
    ],
)
def test_other_packages_and_files_are_named(monkeypatch: pytest.MonkeyPatch, kind: str, fact: str, words: str) -> None:
    values = iter(("1", "2"))
    monkeypatch.setattr(same_start, kind, lambda *_: {fact: next(values)})
    monkeypatch.setattr(same_start, "_DRIVERS", ())
    [sentence] = set(_started([[], []]))
    assert sentence.startswith(f"Rank 1 has other {words}")


def test_programs_are_compared_by_arguments_and_text(tmp_path: Path) -> None:
    def said_of(batches: Sequence[int], programs: Sequence[Path | None]) -> set[str]:
        return set(said(3, lambda comm: check_same_program(comm, {"batch": batches[comm.rank]}, programs[comm.rank])))

    one, same, other = (tmp_path / name / "train.py" for name in ("a", "b", "c"))
    for path, text in ((one, "x = 1"), (same, "x = 1"), (other, "x = 2")):
        path.parent.mkdir()
        path.write_text(text)
    assert said_of([8, 8, 8], [one, same, one]) == said_of([8, 8, 8], [None] * 3) == {""}
    sentence = "Rank 2 has another program than rank 0: train.py differs; give all nodes the same file."
    assert said_of([8, 8, 8], [one, same, other]) == {sentence}
    sentence = "Rank 1 has other arguments of hpctrain.start than rank 0: batch is 9, not 8; give all ranks the same arguments."
    assert said_of([8, 9, 8], [one] * 3) == {sentence}


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
    assert {"nn/program.py", "run/training.py", "version.py"} <= names.keys()
    assert {"backend/cuda/libraries.py", "backend/cuda/conv2d.py"} <= of_gpus.keys()
    assert not names.keys() & of_gpus.keys()
    aside = ("doctor/", "report/", "testing/")
    assert not any(name.startswith(aside) for name in (*names, *of_gpus))


@pytest.mark.parametrize("differ", [False, True])
def test_modules_of_gpus_are_compared_between_the_nodes_that_have_some(differ: bool) -> None:
    """Rank 1 is on a node without a GPU, and says nothing of them."""

    def work(comm: Communicator) -> None:
        of_gpus = None if comm.rank == 1 else {"backend/cuda/x.py": comm.rank if differ else 0}
        for facts in ({"nn/x.py": 0}, of_gpus):
            mend = "install the same version of hpctrain on all nodes"
            compare(comm, Subject("other files of hpctrain", mend, facts, lambda key, *_: f"{key} differs"))

    sentence = "Rank 2 has other files of hpctrain than rank 0: backend/cuda/x.py differs; "
    sentence += "install the same version of hpctrain on all nodes."
    assert said(3, work) == [sentence if differ else ""] * 3


COUNT, SHAPE, NAMES = 20, (7, 6, 1), ["a", "b", "c"]


def write(path: Path, count: int = COUNT, shape: tuple[int, int, int] = SHAPE, names: Sequence[str] = NAMES) -> Path:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (COUNT + 1, *shape), dtype=np.uint8)[:count]
    write_data_file(path, count, shape, list(names), [(images, np.arange(count) % 3)])
    return path


def changed(path: Path, **datasets: Callable[[np.ndarray], np.ndarray]) -> Path:
    """Write a file in which some datasets are changed and have matching checksums."""
    write(path)
    with h5py.File(path, "r+") as file:
        for name, change in datasets.items():
            values = change(file[name][()])
            file[name][...] = values
            file[name].attrs["sha256"] = np.bytes_(digest_of(values))
    return path


def with_other_image(path: Path, number: int, *, declared: bool) -> Path:
    """Write a file with one changed pixel. declared: the checksums match it."""

    def flip(images: np.ndarray) -> np.ndarray:
        images[number, 0, 0, 0] ^= 1
        return images

    def sums(values: np.ndarray) -> np.ndarray:
        values[number] ^= 1
        return values

    if declared:
        return changed(path, images=flip, sums=sums)
    write(path)
    with h5py.File(path, "r+") as file:
        file["images"][...] = flip(file["images"][()])
    return path


#: by the fact that differs, and by nothing else as far as that can be: a file, and the words for it
OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "samples": (lambda path: write(path, count=COUNT - 3), "number of samples is 17, not 20"),
    "size": (lambda path: write(path, shape=(7, 5, 1)), "shape of images is 7 x 5 x 1, not 7 x 6 x 1"),
    "channels": (lambda path: write(path, shape=(7, 6, 3)), "shape of images is 7 x 6 x 3, not 7 x 6 x 1"),
    "number of classes": (lambda path: write(path, names=[*NAMES, "d"]), "number of classes is 4, not 3"),
    "order of classes": (lambda path: write(path, names=NAMES[::-1]), "class 0 is c, not a"),
    "labels": (lambda path: changed(path, labels=lambda labels: np.roll(labels, 1)), "checksum of labels is "),
    "mean": (lambda path: changed(path, mean=lambda mean: np.nextafter(mean, 1)), "mean of channel 0 is 0."),
    "deviation": (lambda path: changed(path, std=lambda std: np.nextafter(std, 1)), "deviation of channel 0 is 0."),
    "a stored image": (lambda path: with_other_image(path, COUNT - 1, declared=False), "checksum of image 19 is "),
    "an image between": (lambda path: with_other_image(path, 9, declared=True), "checksum of all images is "),
}


def job_of(session: Session) -> Job:
    """Return the job of a program on a virtual rank."""
    parts = {name: getattr(session, name) for name in ("launcher", "threads", "world", "grid", "groups", "progress")}
    return Job(**parts, batch=8, progress_mode="test", checkpoints=LoopCheckpoints(session.world, session.progress.notes, 60))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration, data files, a run with a checkpoint, and a file that differs for each fact."""
    inputs = tmp_path_factory.mktemp("inputs")
    prepare(inputs)
    for split in ("train", "test"):
        write(inputs / f"{split}.h5")
    train(inputs, steps=1)
    for number, (make, _) in enumerate(OTHERS.values()):
        make(inputs / f"other-{number}.h5")
    return inputs


#: what reads a data file: the key of the configuration that names it, and what is done with a session and the rank's file
SECTIONS: dict[str, tuple[str, Callable[[Session, Path], object]]] = {
    "train": ("data.train", lambda session, _: run_training(session, SignalWatch(), TrainingRequest(style="none"))),
    "test": ("data.test", lambda session, _: run_training(session, SignalWatch(), TrainingRequest(style="none"))),
    "resume": ("data.train", lambda session, _: run_training(session, SignalWatch(), TrainingRequest("auto", style="none"))),
    "eval": ("data.test", lambda session, _: run_evaluation(session, "auto")),
    "report": ("data.test", lambda session, _: judge(session, "auto", 3)),
    "automatic": ("data.train", lambda session, _: choose(_automatic(session), StartedJob(session.world, 1, 60), None)),
    "loader": ("", lambda session, path: job_of(session).loader(object.__new__(Replica), path)),
    "like": ("", lambda session, path: job_of(session).loader(object.__new__(Replica), path.parent / "train.h5", like=path)),
}
_SHOWN = {"loader": "data file", "like": "file of `like`"}


def _automatic(session: Session) -> Any:
    return load(Path(session.config.output).parent / "tiny.yaml", [f"data.train={session.config.data.train}", "grid=auto"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("fact", OTHERS)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_rank_whose_file_differs_in_one_fact_is_named(inputs: Path, section: str, fact: str) -> None:
    key, work = SECTIONS[section]
    before = {path.name for path in (inputs / "runs").iterdir()}

    def on_rank(comm: Communicator) -> object:
        name = f"other-{list(OTHERS).index(fact)}.h5" if comm.rank == 1 else "train.h5"
        return work(_session(comm, inputs / "tiny.yaml", [f"{key}={inputs}/{name}"] if key else []), inputs / name)

    [sentence] = set(said(3, on_rank))
    assert sentence.startswith(f"Rank 1 has another {_SHOWN.get(section, key)} than rank 0: {OTHERS[fact][1]}"), sentence
    assert "give all nodes the same " in sentence
    assert {path.name for path in (inputs / "runs").iterdir()} == before


def test_the_doctor_says_what_a_training_says(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_checks, "check_same_start", lambda *_, **__: None)  # here, other files have other paths

    def gathered(paths: Sequence[Path], key: str) -> str:
        def on_rank(comm: Communicator) -> tuple[str, str]:
            config = load(inputs / "tiny.yaml", [f"{key}={paths[comm.rank]}"])[0]
            place: Any = SimpleNamespace(world=comm, own=OwnPlace(Launcher("none"), config, inputs))
            return rank_checks.gather_training(place)

        [finding] = rank_checks.judge_training(view(*[1] * len(paths)), run_virtual(len(paths), on_rank))
        return f"{finding.severity.value}: {finding.sentence}"

    here, other = inputs / "train.h5", inputs / "other-0.h5"
    sentence = "fault: Rank 1 has another data.test than rank 0: number of samples is 17, not 20 (rank 1 is on nid1)."
    assert gathered([here, other], "data.test") == sentence
    assert gathered([other, other], "data.test") == "ok: Grid 1 x 2; 2 data files, the same on all ranks."
    assert gathered([other], "data.test") == "ok: Grid 1 x 1; 2 data files."
    weights = [inputs / f"{rank}.pt" for rank in range(2)]
    for path in weights:
        path.write_text(path.name)
    assert gathered(weights, "init.weights").startswith("fault: Rank 1 has another file of weights than rank 0: sha256 is ")


# -- formats ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the same samples in each format: pixels and picture files."""
    inputs = tmp_path_factory.mktemp("formats")
    form = PictureForm(SHAPE[:2], "crop", SHAPE[2], True)
    pixels = write(inputs / "pixels.h5")
    contents = []
    for image in np.asarray(ImageFile.open(pixels).images):
        stream = io.BytesIO()
        Image.fromarray(image[..., 0]).save(stream, "PNG")
        contents.append(stream.getvalue())
    pictures = [form.picture(content, number % 3) for number, content in enumerate(contents)]
    with form.writer(inputs / "pictures.h5", COUNT, SHAPE, NAMES) as writer:
        pack(writer, pictures, lambda count: None)
    return {path.stem: path for path in inputs.iterdir()}


def opened_by(inputs: Path, paths: Sequence[Path]) -> list[str]:
    """Return what each rank raises when rank i opens the i-th of these training files."""

    def on_rank(comm: Communicator) -> None:
        open_alike(comm, load(inputs / "tiny.yaml", [f"data.train={paths[comm.rank]}"])[0], ("train", "test"))

    return said(len(paths), on_rank)


def test_the_same_samples_are_the_same_data_in_any_format(inputs: Path, formats: dict[str, Path]) -> None:
    for names in (*combinations_with_replacement(formats, 2), ("pixels",), ("pictures", "pixels", "pictures")):
        assert opened_by(inputs, [formats[name] for name in names]) == [""] * len(names), names


@pytest.mark.parametrize("stem", ["pixels", "pictures"])
@pytest.mark.parametrize("fact", ["samples", "order of classes", "labels", "mean", "a stored image"])
def test_other_samples_are_other_data_in_any_format(inputs: Path, formats: dict[str, Path], fact: str, stem: str) -> None:
    other = inputs / f"other-{list(OTHERS).index(fact)}.h5"
    [sentence] = set(opened_by(inputs, [formats[stem], other, formats["pixels"]]))
    assert sentence.startswith(f"Rank 1 has another data.train than rank 0: {OTHERS[fact][1]}"), sentence


def test_picture_files_are_compared_as_they_are_stored(inputs: Path, formats: dict[str, Path], tmp_path: Path) -> None:
    """A changed byte of a picture file is found without decoding it."""
    reader = ImageFile.open(formats["pictures"]).pixels
    assert isinstance(reader, BlockReader)
    content = bytearray(formats["pictures"].read_bytes())
    content[reader.extents.first + 20] ^= 1
    (tmp_path / "damaged.h5").write_bytes(content)
    sentences = opened_by(inputs, [formats["pixels"], formats["pictures"], tmp_path / "damaged.h5"])
    [sentence] = set(sentences)
    assert sentence.startswith("Rank 2 has another data.train than rank 0: checksum of image 0 is ")
    assert sentence.endswith(f"; give all nodes the same {tmp_path}/damaged.h5.")


def test_a_bounded_part_of_a_file_is_read_and_what_cannot_be_read_is_unknown(inputs: Path, tmp_path: Path, monkeypatch) -> None:
    write_data_file(tmp_path / "large.h5", 40, (300, 300, 3), ["a"], [(np.zeros((40, 300, 300, 3), np.uint8), np.zeros(40, int))])
    read: list[int] = []
    plain = BlockReader._read_piece

    def counted(self: BlockReader, at: int, out: memoryview) -> None:
        read.append(len(out))
        plain(self, at, out)

    monkeypatch.setattr(BlockReader, "_read_piece", counted)
    compared_facts(ImageFile.open(tmp_path / "large.h5"))
    assert 2 * 270_000 <= sum(read) <= 1 << 20
    facts = compared_facts(ImageFile.open(inputs / "train.h5"))
    monkeypatch.setattr(BlockReader, "_read_file", lambda self, pieces, patient: "Input/output error")
    unread = compared_facts(ImageFile.open(inputs / "train.h5"))
    assert {name for name in facts if name not in unread} == {name for name in facts if name.startswith("checksum of image ")}
    assert said(2, lambda comm: compare(comm, Subject("x", "y", (facts, unread)[comm.rank], partial=True))) == ["", ""]


# -- who is named ----------------------------------------------------------------------------------------------------------------
@settings(max_examples=amount(30, 60), deadline=None)
@given(values=st.lists(st.sampled_from([1, 2, 3, None]), min_size=1, max_size=7), partial=st.booleans())
def test_the_ranks_apart_from_most_are_named(values: list[int | None], partial: bool) -> None:
    """The value None stands for a rank that has nothing to compare."""

    def on_rank(comm: Communicator) -> None:
        value = values[comm.rank]
        compare(comm, Subject("another file", "mend it", None if value is None else {"x": value}, partial=partial))

    sentences = set(said(len(values), on_rank))
    looked = [rank for rank, value in enumerate(values) if value is not None]
    groups = {value: [rank for rank in looked if values[rank] == value] for value in dict.fromkeys(values) if value is not None}
    if len(groups) < 2:
        assert sentences == {""}
        return
    most = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = [rank for rank in looked if rank not in most]
    has = "has" if len(odd) == 1 else f"and {len(odd) - 1} more of {len(values)} ranks have"
    others = f" and {len(most) - 1} other{'s' * (len(most) > 2)}" if most[0] and len(most) > 1 else ""
    ending = f"rank {most[0]}{others}: x is {values[odd[0]]}, not {values[most[0]]}; mend it."
    assert sentences == {f"Rank {odd[0]} {has} another file than {ending}"}


def test_hosts_are_named_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()

    def on_rank(comm: Communicator) -> None:
        here.host = f"n{comm.rank + 1}"
        compare(comm, Subject("another data.train", "mend it", {"samples": 64 - 3 * comm.rank}))

    monkeypatch.setattr("platform.node", lambda: here.host)
    assert set(said(2, on_rank)) == {"Rank 1 on n2 has another data.train than rank 0: samples is 61, not 64; mend it."}


# -- checkpoints and pictures ----------------------------------------------------------------------------------------------------
def test_checkpoints_that_differ_are_refused_and_no_older_one_takes_their_place(inputs: Path, tmp_path, monkeypatch) -> None:
    run = latest(inputs / "runs", "tiny")
    ((_, newest),) = checkpoint.checkpoints(run.checkpoints)
    content = checkpoint.read(newest)
    paths = []
    for rank, step in enumerate((1, 1, 2)):
        path = checkpoint.checkpoint_path(tmp_path / f"{rank}", 9)
        changes = {"output": str(tmp_path / f"{rank}")}
        checkpoint.write(path, checkpoint.CheckpointContent(content.tensors, {**content.meta, **changes, "global_step": step}))
        write_shards(path.with_suffix(".shards"), checkpoint.read(path), 2)
        paths.append(path)
    for ranks in ((0, 0, 0), (2, 2)):
        for suffix in (".h5", ".shards"):
            assert set(said(len(ranks), lambda comm: read_together(comm, paths[ranks[comm.rank]].with_suffix(suffix)))) == {""}  # noqa: B023
    [sentence] = set(said(2, lambda comm: read_together(comm, paths[2 * comm.rank])))
    assert sentence.startswith("Rank 1 has another checkpoint than rank 0: global_step is 2, not 1; give all nodes the same ")
    for suffix in (".h5", ".shards"):
        [sentence] = set(said(3, lambda comm: read_together(comm, paths[comm.rank // 2].with_suffix(suffix))))  # noqa: B023
        assert sentence.startswith("Rank 2 has another checkpoint than rank 0: sha256 is "), sentence

    here = threading.local()
    older = checkpoint.checkpoint_path(run.checkpoints, 0)
    checkpoint.write(older, content)
    monkeypatch.setattr(resume, "root_digest", lambda path: str(here.rank if path == newest else 0))

    def searches(comm: Communicator) -> object:
        here.rank = comm.rank
        return find_checkpoint(comm, str(inputs / "runs"), "tiny", "auto")

    [sentence] = set(said(2, searches))
    older.unlink()
    assert sentence == f"Rank 1 has another checkpoint than rank 0: sha256 is 1, not 0; give all nodes the same {newest}."


def test_pictures_are_compared_by_size_and_content(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.png" for number in range(40)]
    for number, path in enumerate(files):
        Image.fromarray(np.full(SHAPE[:2], number, np.uint8)).save(path)
    facts = picture_facts(files)
    assert len(facts) == 16
    assert {str(files[0]), str(files[-1])} <= facts.keys()
    monkeypatch.setattr("hpctrain.data.pictures.picture_facts", lambda _: of_ranks[len(asked)] if not asked.append(0) else {})
    for change, words in (
        (lambda: files[0].write_bytes(b"other"), "5 bytes with crc32 "),
        (files[0].unlink, "missing or unreadable (No such file or directory)"),
    ):
        asked: list[int] = []
        change()
        of_ranks = {1: facts, 2: picture_facts(files)}

        def on_rank(comm: Communicator) -> None:
            request = PredictionRequest((tmp_path,))
            run_prediction(_session(comm, inputs / "tiny.yaml", []), "auto", request)

        [sentence] = set(said(2, on_rank))
        assert " has other pictures than rank " in sentence
        assert f"{files[0]} is " in sentence
        assert words in sentence


# -- arrays and arguments of programs --------------------------------------------------------------------------------------------
IMAGES, LABELS = np.random.default_rng(0).standard_normal((16, 9, 7, 3)), np.arange(16) % 5


def _with(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] = value
    return changed


def on_jobs(ranks: int, folder: Path, work: Callable[[Job, int], object]) -> None:
    """Do some work with the job of each virtual rank."""
    prepare(folder)
    run_virtual(ranks, lambda comm: work(job_of(_session(comm, folder / "tiny.yaml", [])), comm.rank))


def test_values_must_be_finite_in_the_dtype_of_the_replica(tmp_path: Path) -> None:
    def work(job: Job, _: int) -> None:
        narrow = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
        with pytest.raises(DataError, match="Sample 2 of images holds a value that is not finite in float32"):
            job.array_loader(narrow, _with(IMAGES, (2, 0, 0, 0), 1e300), LABELS)
        replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy", dtype="float64")
        job.array_loader(replica, _with(IMAGES, (2, 0, 0, 0), 1e300), LABELS)
        for images, labels, name in (([[1.0], [1.0, 2.0]], LABELS, "images"), (IMAGES, [[1], [1, 2]], "labels")):
            with pytest.raises(DataError, match=f"{name} cannot be converted to an array"):
                job.array_loader(replica, images, labels)
        for images, labels in ((IMAGES.tolist(), LABELS.tolist()), (IMAGES[::-1], LABELS.astype(np.uint8))):
            [first, *_] = job.array_loader(replica, images, labels, shuffle=False).epoch(0)
            assert np.array_equal(first.x, np.asarray(images)[:8])
            assert np.array_equal(first.y, labels[:8])

    on_jobs(1, tmp_path, work)


OTHER_ARRAYS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (_with(IMAGES, (9, 0, 0, 0), 7.0), LABELS, {}, r"Rank 1 has other arrays in .*images is \(16, 9, 7, 3\) float64"),
    (IMAGES.astype(np.float32), LABELS, {}, "Rank 1 has other arrays in job.array_loader .*images is"),
    (IMAGES[:12], LABELS[:12], {}, r"images is \(12, 9, 7, 3\) float64 .* not \(16, 9, 7, 3\)"),
    (IMAGES, np.roll(LABELS, 1), {}, r"labels is \(16,\) with crc32"),
    (IMAGES, LABELS, {"seed": 1}, "Rank 1 has other arguments of job.array_loader than rank 0: seed is 1, not 0"),
    (IMAGES, LABELS, {"batch": 4}, "Rank 1 has other arguments of job.array_loader than rank 0: batch is 4, not None"),
]
OTHER_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 3}, "Rank 1 has other arguments of job.loader than rank 0: seed is 3, not 0"),
    ({"augment": ["flip"]}, r"augment is \['flip'\], not \(\)"),
    ({"mixing": {"mixup": 0.5}}, "mixing is "),
]


def test_a_rank_with_other_arrays_or_arguments_is_named(tmp_path: Path) -> None:
    def work(job: Job, rank: int) -> None:
        replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy", dtype="float64")
        job.array_loader(replica, IMAGES.copy(), LABELS.copy())
        for images, labels, options, words in OTHER_ARRAYS:
            with pytest.raises(HpctrainError, match=words):
                job.array_loader(replica, *((images, labels) if rank else (IMAGES, LABELS)), **(options if rank else {}))
        for options, words in OTHER_OPTIONS:
            with pytest.raises(ConfigError, match=words):
                job.loader(object.__new__(Replica), tmp_path / "train.h5", **(options if rank else {}))

    on_jobs(2, tmp_path, work)


def test_a_rank_with_another_network_or_optimizer_is_named(tmp_path: Path) -> None:
    """The options differ inside the model and the optimiser, as if a program took them from its environment."""

    def work(job: Job, rank: int) -> None:
        model = hpctrain.model("small", classes=5, channels_in=3, hidden=4, dropout=0.5 if rank else 0.25)
        with pytest.raises(ConfigError, match=r"Rank 1 has another network in job.replica than rank 0: .*rate=0\.5"):
            job.replica(model, (12, 12, 3), backend="numpy")
        momentum = 0.5 if rank else 0.9
        with pytest.raises(ConfigError, match=r"Rank 1 has another optimizer in .* than rank 0: momentum is 0\.5, not 0\.9"):
            job.replica(nets.plain(), (9, 7, 3), backend="numpy", optimizer=lambda: Sgd(momentum=momentum))

    on_jobs(2, tmp_path, work)


# -- processes -------------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_nodes_with_other_files_under_one_path_end_before_the_first_step(job: Callable[..., Outcome], tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        prepare(tmp_path / f"{rank}")
        write(tmp_path / f"{rank}" / "train.h5", COUNT - rank)
        (tmp_path / f"{rank}" / "run.yaml").write_text(
            (tmp_path / "0" / "tiny.yaml").read_text().replace(f"{tmp_path}/0/train.h5", "train.h5")
        )
    program = """
import os, runpy, sys
os.chdir(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
sys.argv = ["hpctrain", "train", "run.yaml"]
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""
    outcome = job(2, ["-c", program], cwd=tmp_path)
    assert outcome.code != 0
    sentence = "Rank 1 has another data.train than rank 0: number of samples is 19, not 20; give all nodes the same train.h5."
    assert outcome.stderr.count(sentence) == 1, outcome.output
    assert not (tmp_path / "0" / "runs").exists()


def sentences(monkeypatch: pytest.MonkeyPatch, kind: str, of_ranks: list[dict[str, str]]) -> list[str]:
    """Return what each rank raises if its code has these digests."""

    def work(comm: ThreadCommunicator) -> None:
        monkeypatch.setattr(user_code, kind, lambda: of_ranks[comm.rank])  # virtual ranks take turns, one goes on at a time
        check_same_code(comm)

    return said(len(of_ranks), work)


def test_all_ranks_must_have_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"own.py:A": "own.py sha256 1"}
    assert sentences(monkeypatch, "digests", [{}, {}]) == [""] * 2
    assert sentences(monkeypatch, "digests", [same, dict(same), same]) == [""] * 3
    for other in ({}, {"own.py:A": "own.py sha256 2"}, {**same, "own.py:B": "own.py sha256 1"}):
        [sentence] = set(sentences(monkeypatch, "digests", [same, same, other]))
        assert re.match(r"Rank 2 has other code than rank 0: own\.py:[AB] is ", sentence)
        assert sentence.endswith("; give all nodes the same files.")


def test_modules_that_code_imports_are_compared_where_several_ranks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentences(monkeypatch, "modules", [{"blocks": "1"}, {"blocks": "1", "plots": "2"}, {}]) == [""] * 3
    [sentence] = set(sentences(monkeypatch, "modules", [{"blocks": "1"}, {"plots": "1"}, {"blocks": "2", "plots": "1"}]))
    assert sentence == "Rank 2 has other code than rank 0: blocks is 2, not 1; give all nodes the same files."


def test_modules_are_those_of_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_blocks.py").write_text("x = 1\n")
    (tmp_path / "own_net.py").write_text("import own_blocks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("own_net")
    before = user_code.modules()
    assert {"own_net", "own_blocks", __name__} <= before.keys()
    assert not before.keys() & {"numpy", "json", "hpctrain", "hpctrain.core.user_code", "pytest", "__main__"}
    (tmp_path / "own_blocks.py").write_text("x = 2\n")
    assert {name for name, value in user_code.modules().items() if value != before[name]} == {"own_blocks"}


@pytest.mark.parametrize(
    ("override", "trusted"),
    [
        ("optimizer={name: lars, lr: 1}", True),
        ("optimizer={name: 'own.py:A', lr: 1}", False),
        ("optimizer={name: offered, lr: 1}", False),
        ("averager=own.py:A", False),
        ("model=own.py:A", False),
        ("schedule=own:A", False),
        ("data.augment=[flip, 'own:A']", False),
        ("metrics.reporters=['own:A']", False),
    ],
)
def test_code_that_only_a_checkpoint_names_is_not_trusted(override: str, trusted: bool) -> None:
    stored, now = load(CONFIG, [override])[0], load(CONFIG)[0]
    assert is_trusted(stored, now) == trusted
    assert is_trusted(stored, stored)
    assert is_trusted(now, stored)

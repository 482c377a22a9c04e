"""Benchmarks of data and messages, medians of pairs with their intervals, and the tables, plots and pictures made of them."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks import augmentations, compress, crops, data_waits, decode, engine_report, loading, plots
from benchmarks.augmentations import images_of, of_ours
from benchmarks.data_waits import Waits, waits_of
from benchmarks.loading import STORED, encoded, of_file, of_jpeg, written
from benchmarks.pairs import interval, paired, ratio
from benchmarks.step_picture import StepPicture, picture, step_picture_lanes


def metrics(epochs: int) -> list[str]:
    """Lines of a run's metrics: each epoch of 4 steps takes as many seconds as its number, and waits a quarter of them."""
    lines = ['{"kind": "step", "epoch": 1, "seconds": 9.0}']
    for epoch in range(1, epochs + 1):
        waits = {"steps": 4, "seconds": float(epoch), "waited_seconds": epoch / 4, "most_waited_seconds": epoch / 2}
        lines.append(json.dumps({"kind": "data", "epoch": epoch, **waits}))
        lines.append(json.dumps({"kind": "reads", "epoch": epoch, "file_samples": 100 + 7 * epoch}))
    return lines


def test_epochs_from_the_second_on_count() -> None:
    waits = waits_of(metrics(3))
    assert waits == Waits(steps=8, seconds=5.0, waited_seconds=1.25, most_waited_seconds=2.5, file_samples=14)
    assert (waits.share, waits.most_share) == (0.25, 0.5)
    with pytest.raises(ValueError, match="give --epochs 2 or more"):
        waits_of(metrics(1))


def test_the_table_has_medians_of_rounds() -> None:
    rounds = [Waits(10, 2.0, waited, 2 * waited, file_samples) for waited, file_samples in ((0.02, 0), (0.04, 5), (0.5, 0))]
    *_, line = data_waits.table({data_waits.Case("true", 2).name: rounds}).splitlines()
    assert line.startswith("| data.cache=true data.threads=2 | 3 | 0.2000 | 2.000 [1.000, 25.000] | 4.000 [2.000, 50.000] | 5 |")


def test_rates_are_those_of_whole_batches() -> None:
    found = [
        {"stage": stage, "threads": count, "images_per_second": 100.0 * count}
        for count in (1, 2)
        for stage in ("whole batches", "read")
    ]
    assert data_waits.rates({"stages": found}).splitlines()[2:] == ["| 1 | 100 | 1.00 |", "| 2 | 200 | 2.00 |"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("job")
def test_waits_for_data_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--images", "24", "--batch", "8", "--epochs", "2", "--rounds", "1", "--threads", "1"]
    large = ["--large", "data.synthetic.height=40", "data.synthetic.width=40", "data.synthetic.samples=8", "batch=4"]
    assert data_waits.main([*tiny, *large, "--out", str(tmp_path / "waits.json")]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "waits.json").read_text())
    samples = {name: [one["file_samples"] for one in of] for name, of in result["waits"].items()}
    assert samples == {"data.cache=false data.threads=1": [24], "data.cache=true data.threads=1": [0]}
    assert said.count("| data.cache=") == 2
    assert said.count("| 1 | ") == 3


def photo(height: int, width: int) -> bytes:
    """A JPEG file."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
def test_large_pictures_lie_as_the_small_ones(shape: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(decode.large(photo(*shape)))) as image:
        assert (image.height > image.width) == (shape[0] > shape[1])
        assert {image.height, image.width} == {400, 533}


def test_all_decoders_give_the_same_pixels() -> None:
    content = photo(31, 45)
    first, *others = [of(content) for of in decode.decoders().values()]
    assert all(np.array_equal(pixels, first) for pixels in others)


def test_ours_goes_to_the_network() -> None:
    out = decode.chains()["hpctrain"]([photo(300, 280)])
    assert isinstance(out, np.ndarray)
    assert out.shape == (1, decode.CROP, decode.CROP, 3)


def test_rates_and_ratios_are_of_rounds() -> None:
    lines = decode.table("some", 10, {"decode: hpctrain": [0.5, 0.5], "decode: Pillow": [1.0, 2.0]}).splitlines()
    assert "| decode: Pillow | 8 | 3.000 [2.000, 4.000] |" in lines


@pytest.mark.slow
def test_everything_installed_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(photo(80, 70))
    assert decode.main([str(tmp_path), "--rounds", "1", "--out", str(tmp_path / "rounds.json")]) == 0
    seconds = json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    assert all({f"decode to {decode.PIXELS} px: hpctrain", "to the network: hpctrain"} <= set(of) for of in seconds.values())
    assert capsys.readouterr().out.count("| decode: hpctrain |") == 2


def test_images_are_neither_plain_nor_noise_alone() -> None:
    images = images_of(16, 3)
    assert images.shape == (3, 16, 16, 3)
    assert images.dtype == np.uint8
    assert 20 < images.std() < 120
    for work in of_ours(images).values():
        work()


def test_augmentations_rates_and_ratios_are_of_rounds() -> None:
    seconds = {"randaugment": [0.5, 0.5], "RandAugment": [1.0, 2.0]}
    seconds |= {"trivial_augment_wide": [1.0, 1.0], "TrivialAugmentWide": [1.0, 1.0]}
    lines = augmentations.table(32, 10, seconds).splitlines()
    assert "| randaugment | 20 | 8 | 3.000 [2.000, 4.000] |" in lines
    assert "| trivial_augment_wide | 10 | 10 | 1.000 [1.000, 1.000] |" in lines


def test_ours_runs_and_draws_again_in_each_round() -> None:
    work = crops.of_ours(images_of(40, 2), 16)
    first, second = work().copy(), work().copy()  # type: ignore[attr-defined]
    assert first.shape == (2, 16, 16, 3)
    assert (first != second).any()


def test_crops_rates_and_ratios_are_of_rounds() -> None:
    lines = crops.table(10, {crops.OURS: [0.5, 0.5], "other": [1.0, 2.0]}).splitlines()
    assert lines[2:] == ["| hpctrain | 20 |  |", "| other | 8 | 3.000 [2.000, 4.000] |"]


def test_ours_reads_all_images_of_both_kinds(tmp_path: Path) -> None:
    images = images_of(STORED, 18)
    for works in (of_jpeg(encoded(images)), of_file(written(images, tmp_path / "train.h5"))):
        assert set(works) == {loading.OURS, loading.PIXELS}
    loaded = {name: work() for name, work in works.items()}
    assert loaded == {loading.OURS: [16, 2], loading.PIXELS: [16, 2]}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("module", "words", "measured"),
    [
        (augmentations, [], {*augmentations.OURS, *augmentations.OURS.values()}),
        (crops, ["--count", "2"], {crops.OURS, *crops.PEERS}),
        (loading, ["--count", "4"], {loading.OURS, loading.PIXELS, *loading.PEERS}),
    ],
)
def test_torchvision_is_measured_too(module: ModuleType, words: list[str], measured: set[str], tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "torchvision")):
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    assert module.main(["--rounds", "1", *words, "--out", str(tmp_path / "rounds.json")]) == 0
    seconds = json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    found = [seconds] if module is crops else seconds.values()
    assert all(set(one) == measured for one in found)


def test_all_that_is_measured_can_be_run_on_every_kind_of_array() -> None:
    for values in compress.arrays(500, "float32").values():
        assert values.shape == (500,)
        for work in (compress.of_one_array(values, (0.01, 0.5)), compress.of_casts(values)):
            assert next(iter(work)) == compress.BASE
            for run in work.values():
                run()


def test_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    seconds = compress.measure({"one": lambda: calls.append("one"), "two": lambda: calls.append("two")}, 3)
    assert calls == ["one", "two"] * 4
    assert {name: len(values) for name, values in seconds.items()} == {"one": 3, "two": 3}


def test_ratios_are_of_pairs() -> None:
    text = compress.table("title", {compress.BASE: [0.001, 0.002], "other": [0.002, 0.004]})
    assert f"| {compress.BASE} | 1.500 [1.000, 2.000] |  |" in text
    assert "| other | 3.000 [2.000, 4.000] | 2.000 [2.000, 2.000] |" in text


def test_a_run_writes_all_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert compress.main(["--elements", "2000", "--rounds", "2", "--dtype", "float64", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert np.shape(result["seconds"]["all zero"][compress.BASE]) == (2,)
    assert "2,000 float64 in 16 bits:" in capsys.readouterr().out


_VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15)


@settings(max_examples=30)
@given(_VALUES)
def test_interval_holds_the_median_and_lies_among_the_values(values: list[float]) -> None:
    found = interval(values)
    assert found.median == pytest.approx(np.median(values))
    assert min(values) <= found.low <= found.median * (1 + 1e-12)
    assert found.median * (1 - 1e-12) <= found.high <= max(values)


@settings(max_examples=30)
@given(_VALUES, st.floats(0.5, 4.0))
def test_interval_scales_with_the_values(values: list[float], factor: float) -> None:
    once, scaled = interval(values), interval([factor * value for value in values])
    assert (scaled.low, scaled.high) == pytest.approx((factor * once.low, factor * once.high))


@pytest.mark.slow
def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for seed in range(100):
        found = interval(random.standard_normal(25).tolist(), seed=seed)
        hits += found.low <= 0.0 <= found.high
    assert 88 <= hits <= 100


def test_ratios_are_those_of_pairs() -> None:
    """A drift that both sides share cancels, as it would not in a ratio of medians."""
    drift = np.array([1.0, 9.0, 2.0, 7.0, 1.5, 30.0, 4.0])
    found = ratio(1.25 * drift, drift[:].tolist())
    assert (found.low, found.median, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_paired_takes_any_function_of_a_round() -> None:
    found = paired(lambda compute, cost, step: max(compute + cost, 2.0) / step, [1.0, 3.0, 3.0], [0.5, 1.0, 1.0], [4.0, 5.0, 8.0])
    assert found.median == 0.5


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_have_no_median_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.slow
def test_panels_are_one_image_in_a_directory_of_its_own(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with plots.panels(tmp_path / "new" / "two.png", 2, 3, 2) as (left, right):
        left.plot([1, 2])
        right.plot([2, 1])
    image = (tmp_path / "new" / "two.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20], "big") > 2 * int.from_bytes(image[20:24], "big")  # width and height
    assert not pyplot.get_fignums()


def test_an_error_leaves_no_image_and_no_figure(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with pytest.raises(ZeroDivisionError), plots.panels(tmp_path / "one.png", 1, 3, 2):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    assert not pyplot.get_fignums()


def test_without_matplotlib_the_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"), plots.panels(tmp_path / "one.png", 1, 3, 2):
        pass


def _variant(seconds: list[float], *, steps: int = 2, finite: bool = True, **more: Any) -> dict[str, Any]:
    turns = [
        {"wall_seconds": 9.0 * one, "cpu_seconds": steps * one, "finite": finite, "peak_bytes": 10**8 + i}
        for i, one in enumerate(seconds)
    ]
    base = {"turns": turns, "steps": steps, "dropped": False, "failure": None, "idle_cpu_seconds": 0.0, "first_seconds": 0.0}
    return {**base, **more}


def _run() -> dict[str, Any]:
    return {
        "network": "small",
        "batch": 4,
        "pixels": 28,
        "threads": 1,
        "clock": "cpu",
        "steps": 2,
        "seconds": 100.0,
        "load_before": [0.5],
        "load_after": [1.5],
        "ours": ["onednn"],
        "peers": ["torch", "torch last", "torch compiled"],
        "variants": {
            "onednn": _variant([0.1, 0.2, 0.4]),
            "torch": _variant([0.5, 0.6, 0.5], dropped=True),
            "torch last": _variant([0.2, 0.3, 1.2], finite=False),
            "torch compiled": _variant([], failure="first line\nno compiler"),
        },
    }


def test_the_best_peer_has_the_lowest_median() -> None:
    assert engine_report.best_peer(_run()) == "torch last"


def test_speed_is_the_median_of_pairs_by_the_runs_clock() -> None:
    found = engine_report.speedup(_run(), "onednn", "torch last")
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 1.5, 3.0))


def test_the_table_tells_everything() -> None:
    text = engine_report.report({"machine": {"cpu": "x"}, "runs": [_run()]})
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "200.00" in lines["onednn"]  # ms a step
    assert "20.00" in lines["onednn"]  # images a second
    assert "2.000 [1.500, 3.000]" in lines["onednn"]
    assert "stopped early" in lines["torch"]
    assert "LOSS NOT FINITE" in lines["torch last"]
    assert lines["torch compiled"].endswith("failed: no compiler")
    assert engine_report.peak_bytes(_run()["variants"]["onednn"]) == 10**8 + 2


SHOWN = Path(__file__).parents[2] / "docs" / "images" / "step.svg"


def _work(category: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": 0, "name": category, "cat": category, "ts": begin * 1e6, "dur": length * 1e6}


def _operation(track: int, name: str, begin: float, end: float) -> list[dict[str, Any]]:
    shared = {"pid": 0, "tid": track, "name": name, "cat": "communication", "id": f"{track}.{name}"}
    return [{**shared, "ph": "b", "ts": begin * 1e6}, {**shared, "ph": "e", "ts": end * 1e6}]


def _trace() -> dict[str, Any]:
    """A step from 10 s to 20 s: 3 s forward, 4 s backward, 2 s waiting, 1 s update; a gather that began in the step before."""
    names = {0: "program", 1: "all gradients", 2: "all parameters", 3: "step message"}
    tracks = [{"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in names.items()]
    work = [_work("step", 10, 10), _work("forward", 9, 4), _work("input", 13, 3), _work("parameters", 16, 1)]
    work += [_work("wait", 17, 2), _work("update", 19, 1), {**_work("wait", 12, 5), "pid": 1}]
    messages = [*_operation(1, "first", 14, 18), *_operation(1, "second", 17, 19), *_operation(2, "gather", 5, 11)]
    return {"traceEvents": [*tracks, *work, *messages, *_operation(3, "flags", 10, 20)]}


def test_lanes_are_what_the_first_process_did_in_its_step() -> None:
    step = step_picture_lanes(_trace())
    assert step.seconds == pytest.approx(10)
    assert step.waiting_seconds == pytest.approx(2)
    lengths = {kind: sum(end - begin for begin, end in spans) for kind, spans in step.lanes.items()}
    assert lengths == pytest.approx({"forward": 3, "backward": 4, "update": 1, "waiting": 2, "gradients": 5, "parameters": 1})
    assert len(step.lanes["gradients"]) == 1, "operations that overlap are one bar"


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        step_picture_lanes({"traceEvents": [_work("forward", 0, 1)]})


def test_bars_have_one_scale() -> None:
    lanes = dict.fromkeys(("backward", "update", "waiting", "gradients", "parameters"), ())
    steps = {f"a<{seconds:g}": StepPicture(seconds, {**lanes, "forward": ((0.0, seconds),)}) for seconds in (1.0, 4.0)}
    root = ElementTree.fromstring(picture("one & two", steps))
    bars = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("fill") == "#3f7fbf"]
    assert bars[1] == pytest.approx(4 * bars[0], rel=1e-3)
    assert bars[2] == 14, "the legend"


def test_the_picture_of_the_pages_is_small_and_has_its_own_ground() -> None:
    assert SHOWN.stat().st_size < 150_000
    root = ElementTree.fromstring(SHOWN.read_text(encoding="utf-8"))
    view = [float(number) for number in root.get("viewBox", "").split()]
    ground = next(iter(root.iter("{http://www.w3.org/2000/svg}rect")))
    assert [float(ground.get(side, 0)) for side in ("width", "height")] == view[2:]

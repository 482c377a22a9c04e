"""States of models: names, shapes and layouts of other programs, there and back exactly, each difference in a sentence."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import CheckpointError
from hpctrain.models import catalogue
from hpctrain.models.state_dict import check_finite, check_fits, classes_in, declared_state, is_counter, with_counters
from hpctrain.nn.initialise import generator
from hpctrain.testing.layers import exported_shapes

NARROW = {"width": 0.02}


def narrow(name: str, classes: int = 5) -> dict[str, object]:
    """Options of a model of that name with few channels."""
    return {"classes": classes, **NARROW}


def state_of(name: str, classes: int = 5) -> dict[str, np.ndarray]:
    entries = declared_state(catalogue.build(name, narrow(name, classes)))
    return {key: generator(3, key).standard_normal(entry.shape, np.float32) for key, entry in entries.items()}


@pytest.mark.parametrize("name", catalogue.names())
def test_layouts_there_and_back_are_exact_in_every_model(name: str) -> None:
    model = catalogue.build(name, narrow(name))
    entries = declared_state(model)
    assert {key: entry.shape for key, entry in entries.items()} == exported_shapes(model)
    for key, array in state_of(name).items():
        entry = entries[key]
        own = entry.restore(array)
        assert own.flags.c_contiguous
        assert own.shape == (entry.shape if entry.spec is None else entry.spec.shape)
        np.testing.assert_array_equal(entry.export(own), array)


def test_counters_follow_the_statistics_and_are_not_asked_for() -> None:
    entries = declared_state(catalogue.build("resnet20", narrow("resnet20")))
    counted = with_counters(state_of("resnet20"), 7)
    names = list(counted)
    assert names[names.index("bn1.running_var") + 1] == "bn1.num_batches_tracked"
    assert counted["bn1.num_batches_tracked"].dtype == np.int64
    assert {name for name in counted if not is_counter(name)} == entries.keys()
    assert check_fits(entries, counted, source="a.safetensors", model="resnet20") == frozenset()


def test_every_difference_is_a_sentence_with_the_nearest_name() -> None:
    entries = declared_state(catalogue.build("resnet18", narrow("resnet18")))
    state = state_of("resnet18")
    state["fc.wieght"] = state.pop("fc.weight")
    state["fc.bias"] = np.zeros(7, np.float32)
    state["conv1.weight"] = state["conv1.weight"].astype(np.int64)
    with pytest.raises(CheckpointError) as raised:
        check_fits(entries, state, source="a.pt", model="resnet18", ignore=["bn1.*"], hint="Ignore {patterns}.")
    assert str(raised.value).splitlines() == [
        "a.pt lacks fc.weight, which the model resnet18 has; the nearest name is fc.wieght.",
        "a.pt has fc.wieght, which the model resnet18 does not have; the nearest name is fc.weight.",
        "conv1.weight of a.pt holds int64 numbers, but weights must be floating-point numbers.",
        "fc.bias has shape (7,) in a.pt, but (5,) in the model resnet18.",
        'Ignore ["bn1.*", "fc.*", "conv1.*"].',
    ]


def test_many_differences_are_counted() -> None:
    entries = declared_state(catalogue.build("resnet50", narrow("resnet50")))
    with pytest.raises(CheckpointError, match=r"There are further differences between a.pt and the model resnet50\.") as raised:
        check_fits(entries, state_of("resnet18"), source="a.pt", model="resnet50", hint="Ignore {patterns}.")
    assert "Ignore" not in str(raised.value)  # the patterns would cover only a part of the network


@settings(max_examples=20)
@given(changed=st.sets(st.sampled_from(["fc.bias", "classifier.fc2.weight", "conv1.weight", "scale"]), min_size=1))
def test_the_patterns_of_the_advice_ignore_exactly_the_layers_that_differ(changed: set[str]) -> None:
    """The advice is not refused in turn. A fixed pattern for the last layer fails in models that name it otherwise."""
    entries = {
        name: SimpleNamespace(shape=(2,)) for name in ("conv1.weight", "bn.weight", "classifier.fc2.weight", "fc.bias", "scale")
    }
    given_state = {name: np.zeros(3 if name in changed else 2, np.float32) for name in entries}
    with pytest.raises(CheckpointError) as raised:
        check_fits(entries, given_state, source="a.pt", model="small", hint="{patterns}")  # type: ignore[arg-type]
    ignore = json.loads(str(raised.value).splitlines()[-1])
    assert check_fits(entries, given_state, source="a.pt", model="small", ignore=ignore) == changed  # type: ignore[arg-type]


def test_another_model_that_the_file_names_is_the_first_sentence() -> None:
    entries = declared_state(catalogue.build("resnet50", narrow("resnet50")))
    with pytest.raises(
        CheckpointError, match=r"^a.pt holds weights of the model resnet18, which do not fit the model resnet50\."
    ):
        check_fits(entries, state_of("resnet18"), source="a.pt", model="resnet50", named="resnet18")


@settings(max_examples=20)
@given(classes=st.integers(1, 9), pattern=st.sampled_from(["fc.*", "*.bias", "fc.weight"]))
def test_ignored_names_need_not_fit(classes: int, pattern: str) -> None:
    entries = declared_state(catalogue.build("resnet20", narrow("resnet20")))
    state = state_of("resnet20", classes)
    ignored = check_fits(entries, state, source="a.pt", model="resnet20", ignore=["fc.*", pattern])
    assert {"fc.weight", "fc.bias"} <= ignored < entries.keys()
    for name in ignored:
        state.pop(name)
    state["fc.extra"] = np.zeros(2)
    assert "fc.extra" in check_fits(entries, state, source="a.pt", model="resnet20", ignore=["fc.*", pattern])


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    entries = declared_state(catalogue.build("resnet20", narrow("resnet20")))
    with pytest.raises(
        CheckpointError, match=r'"fx.weight" matches no name of a.pt or of the model; the nearest name is fc.weight'
    ):
        check_fits(entries, state_of("resnet20"), source="a.pt", model="resnet20", ignore=["fx.weight"])


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "small", "alexnet"])
def test_classes_are_read_off_the_last_layer(name: str) -> None:
    assert classes_in(catalogue.build(name, NARROW), state_of(name, 13)) == 13
    assert classes_in(catalogue.build(name, NARROW), {}) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_that_are_not_finite_are_refused_by_name(value: float, dtype: type) -> None:
    model = catalogue.build("small", {"classes": 10})
    entries = declared_state(model)
    state = {name: np.zeros(entry.shape, dtype) for name, entry in entries.items()}
    check_fits(entries, state, source="w", model="small")
    for name in (next(iter(entries)), next(reversed(entries))):
        bad = {**state, name: state[name].copy()}
        bad[name].reshape(-1)[-1] = value
        with pytest.raises(
            CheckpointError, match=rf"^{re.escape(name)} of w holds 1 of [\d,]+ numbers that are not finite, the first"
        ):
            check_fits(entries, bad, source="w", model="small", hint="a hint for names")
        assert check_fits(entries, bad, source="w", model="small", ignore=[name])


def test_numbers_that_overflow_in_training_are_refused() -> None:
    state = {"a": np.array([1.0, 1e300])}
    check_finite(state, "w")
    with pytest.raises(CheckpointError, match=r"a of w holds 1 of 2 numbers that are not finite in float32, the first at \[1\]"):
        check_finite(state, "w", "float32")

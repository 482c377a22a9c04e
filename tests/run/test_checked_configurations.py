"""Checks of a configuration before a run: names and options, changes at a resume, and values that exclude each other."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import hpctrain
from hpctrain.assembly.faults import check_config, check_device, device_faults
from hpctrain.assembly.options import FOLLOWING, KINDS, SECTIONS, Choice, choice, choices, defaults, filled, json_schema, names
from hpctrain.averaging import averagers
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.choice import make_backend
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.cli.main import cli
from hpctrain.config.load import dump, known_paths, load, parse
from hpctrain.config.resume_rules import RULES, Change, When, changes, check, flat, rule_for
from hpctrain.config.schema import Config
from hpctrain.config.values import Named
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.text import SYNONYMS, synonyms
from hpctrain.job import session
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.planner import planned_run
from hpctrain.run import automatic_search, python_job
from tests.support import nets, run_in_process
from tests.support.emulated import CudaKernelsFactory

TOP = Path(__file__).parents[2]
CONFIGS = sorted((TOP / "configs").glob("*.yaml"))
TEXT = """\
model:
  name: resnet20
  width: 0.5
data:
  train: nowhere.h5
  augment:
    - name: pad_crop
      padding: 2
    - flip
  evaluate_augment:
    - name: center_crop
      size: 24
batch: 9
epochs: 7
optimizer:
  name: sgd
  lr: 0.1
  momentum: 0.9
schedule:
  name: step
  milestones_epochs: [3, 5]
averager:
  name: blocking
grid:
  cols: 3
"""


def faults(text, *overrides):
    """The lines of the error."""
    config, source = parse(text, "f.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        check_config(config, source)
    return str(caught.value).splitlines()


def passes(text, *overrides):
    check_config(*parse(text, "f.yaml", overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch=3", "micro_batches=3"],
        ["grid.cols=", "batch=1"],
        ["dtype=float64", "backend=numpy"],
        ["dtype=float64", "backend=auto"],
        ["schedule={name: cosine, warmup_epochs: 7}"],
        ["epochs=0", "schedule={name: cosine, warmup_epochs: 5}"],
        ["optimizer.momentum=0"],
        ["data.augment=[randaugment, {name: random_erasing, value: random}]", "model.stochastic_depth=0.2"],
        ["optimizer.weight_decay=1e-4"],
        ["optimizer={name: lars, lr: 1, trust_coefficient: 1e-3}"],
    ],
)
def test_legal_values_at_the_edges_pass(overrides):
    passes(TEXT, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_can_be_named_alone(name):
    passes(TEXT, f"model={{name: {name}}}")


def test_the_command_lines_in_shipped_configurations_pass():
    """Each `hpctrain train FILE OVERRIDES` in a comment is one that works."""
    found = 0
    for path in CONFIGS:
        for line in path.read_text().splitlines():
            if line.startswith("#") and "hpctrain train configs/" in line:
                file, *overrides = line.split("hpctrain train ")[1].split()
                check_config(*load(TOP / file, overrides))
                found += 1
    assert found


@pytest.mark.parametrize("override", ["grid.rows=2", "grid={rows: 4, tiles: [2, 2]}", "plan.layer1.*=model", "plan={fc: model}"])
def test_ranks_without_samples_of_their_own_and_plans_of_the_models_layers_pass(override):
    passes(TEXT, override, "batch=2", "grid.cols=2")


def test_what_is_left_to_the_start_of_a_run_passes():
    passes(TEXT, "grid=auto", "plan=auto", "averager=auto")
    passes(TEXT, "averager=auto", "optimizer.clip_norm=0.5")


CONFIG = """
{model: {name: small, channels: [4, 6]}, data: {train: train.h5, augment: [flip]}, batch: 8, epochs: 6,
 optimizer: {name: sgd, lr: 0.1}, schedule: constant}
"""


def _flat(*overrides: str) -> dict[str, Any]:
    return flat(yaml.safe_load(dump(parse(CONFIG, overrides=overrides)[0])))


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a configuration may have."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            if issubclass(kind, Named):
                yield f"{prefix}{name}"
                yield f"{prefix}{name}.some_option"
        else:
            yield f"{prefix}{name}"


def test_every_key_has_a_rule_and_every_rule_a_key():
    keys = [*_keys(Config), "plan.features.*", "ranks", "images", "labels", "held_out", "code.own.py:Net"]
    rules = {rule_for(key) for key in keys}
    unused = {rule.pattern for rule in RULES if rule not in rules}
    # Of names with and without sections only one of the two patterns is ever needed.
    assert all(pattern.removesuffix(".*") in {key.split(".")[0] for key in keys} for pattern in unused)
    assert {rule.when for rule in rules} == set(When)


WHEN = {
    When.ALWAYS: [
        *("name=b", "output=b", "batch=5", "micro_batches=2", "epochs=9", "threads=1", "backend=numpy", "progress=thread"),
        *("grid.rows=2", "plan.default=domain", "plan={'stage1.*': model}", "averager=lazy", "averager.bucket_bytes=9"),
        *("schedule=cosine", "schedule.warmup_epochs=1", "optimizer.lr=0.2", "optimizer.momentum=0.5", "data.prefetch=0"),
        *("data.test=b.h5", "data.train=moved.h5", "checkpoint.keep=3", "metrics.tensorboard=true", "deadline_seconds=9"),
        *("batch_norm.statistics=synchronised", "trace=true", "evaluate.batch=3", "data.cache=false", "data.threads=3"),
    ],
    When.BETWEEN_EPOCHS: [
        "seed=1",
        "data.augment=[]",
        "data.augment.0.probability=0.1",
        "loss.label_smoothing=0.1",
        "loss.class_weights=balanced",
    ],
    When.NEVER: [
        *("model.channels=[4, 7]", "model.hidden=5", "model=resnet20", "dtype=float64", "data.normalise=false"),
        *("batch_norm.epsilon=0.1", "optimizer={name: lars, lr: 0.1}"),
    ],
}


@pytest.mark.parametrize(("when", "override"), [(when, override) for when, overrides in WHEN.items() for override in overrides])
def test_each_class_of_changes(when: When, override: str):
    (change,) = changes(_flat(), _flat(override))
    for between_epochs in (True, False):
        allowed = when is When.ALWAYS or (when is When.BETWEEN_EPOCHS and between_epochs)
        if allowed:
            check([change], between_epochs=between_epochs, begun_epochs=3, place="x.h5")
            continue
        with pytest.raises(CheckpointError) as refused:
            check([change], between_epochs=between_epochs, begun_epochs=3, place="x.h5")
        assert str(change) in str(refused.value)


def test_fewer_epochs_than_are_begun_are_refused_and_fewer_than_planned_are_not():
    check(changes(_flat(), _flat("epochs=3")), between_epochs=False, begun_epochs=3, place="x.h5")
    with pytest.raises(CheckpointError, match=r"epochs: 6 -> 2 \(the smallest value is 3"):
        check(changes(_flat(), _flat("epochs=2")), between_epochs=True, begun_epochs=3, place="x.h5")


@pytest.mark.parametrize("way", [1, -1])
def test_momentum_may_become_another_but_neither_come_nor_go(way: int):
    differences = changes(*(_flat("optimizer.momentum=0.9"), _flat("optimizer.momentum=0"))[::way])
    with pytest.raises(CheckpointError, match=r"optimizer\.momentum: .* \(may not change from or to 0, "):
        check(differences, between_epochs=True, begun_epochs=1, place="x.h5")


def test_all_that_is_in_the_way_is_in_one_message():
    differences = changes(_flat(), _flat("seed=1", "batch=5", "model.channels=[9]", "dtype=float64"))
    with pytest.raises(CheckpointError) as refused:
        check(differences, between_epochs=False, begun_epochs=1, place="x.h5")
    for words in ("seed: 0 -> 1", "model.channels: [4, 6] -> [9]", "dtype: float32 -> float64", "x.h5"):
        assert words in str(refused.value)
    assert "batch" not in str(refused.value)


@pytest.mark.parametrize("more", [(), ("averager=lazy", "optimizer={name: lars, lr: 1}", "schedule=cosine", "model=resnet20")])
def test_a_default_that_is_written_out_is_no_change(more: tuple[str, ...]):
    config, _ = parse(CONFIG, overrides=more)
    short, full = (flat(yaml.safe_load(dump(each))) for each in (config, filled(config)))
    del short["data.augment"], full["data.augment"]  # a list, compared as a whole
    assert len(full) > len(short)
    assert changes(short, full, defaults(config)) == ()
    assert changes(full, short, defaults(config)) == ()


def test_options_of_something_else_are_not_compared_one_by_one():
    assert changes(_flat("schedule={name: step, milestones_epochs: [1]}"), _flat("schedule=cosine")) == (
        Change("schedule", "step", "cosine"),
    )


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from("abcdef"), leaves), st.dictionaries(st.sampled_from("abcdef"), leaves))
def test_the_changes_lead_from_the_one_to_the_other(old: dict[str, Any], new: dict[str, Any]):
    found = changes(old, new)
    assert {**dict.fromkeys(new), **old, **{change.key: change.new for change in found}} == {**dict.fromkeys(old), **new}
    assert all(change.old != change.new for change in found)
    assert all("\n" not in str(change) for change in found)


ALL = [pytest.param(kind, one, id=f"{kind}-{one.name}") for kind in KINDS for one in choices(kind)]


@pytest.mark.parametrize(("kind", "one"), ALL)
def test_every_name_and_option_has_a_sentence(kind: str, one: Choice) -> None:
    """An option without one: write a line `name: Sentence.` of its own under "Args" of the constructor's docstring."""
    assert one.sentence.endswith((".", ")")), one.sentence
    for option in one.options:
        assert option.meaning.endswith("."), f"{one.name}.{option.name}: {option.meaning!r}"
        assert option.meaning[0].isupper(), option.meaning
        assert option.schema, option.name
    assert not {option.name for option in one.options} & ({"group", "comm", "progress", "base_lr"} | set(one.fixed))


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_filled_configuration_is_the_same_run(path: Path) -> None:
    config, source = load(path)
    full = check_config(config, source).config
    again, source = parse(dump(full))
    check_config(again, source)
    assert again == full == filled(full)
    models = [json.dumps(catalogue.check(each.model.name, each.model.options)) for each in (config, full)]
    assert models[0] == models[1]
    optimizers = [vars(OPTIMIZERS.create(each.optimizer.name, each.optimizer.options)) for each in (config, full)]
    assert optimizers[0].keys() == optimizers[1].keys()
    for section, kind in SECTIONS.items():
        given, complete = getattr(config, section), getattr(full, section)
        assert complete.options == {**complete.options, **given.options}
        wanted = {option.name for option in choice(kind, given.name).options}
        assert wanted <= set(complete.options)
    assert not set(FOLLOWING) & set(full.model.options) - set(config.model.options)
    without = {"model", "optimizer", "schedule", "averager", "data"}
    assert full.model_dump(exclude=without) == config.model_dump(exclude=without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, kind in SECTIONS.items() for name in names(kind) if kind != "models"]
)
def test_every_name_with_all_its_defaults_is_legal(section: str, name: str) -> None:
    needed = {"optimizer": ", lr: 0.1", "schedule": ", milestones_epochs: [1]" if name == "step" else ""}
    config, source = load(CONFIGS[0], [f"{section}={{name: {name}{needed.get(section, '')}}}"])
    full = check_config(config, source).config
    check_config(full, source)
    assert getattr(full, section).name == name


SCHEMA = json_schema()["$defs"]
_SECTIONS = [(f"{section.capitalize()}Config", kind) for section, kind in SECTIONS.items()]


def _alternatives(section: str) -> list[dict]:
    """The mappings with hpctrain's own names; those of the user's code come last."""
    *alternatives, _, _ = SCHEMA[section]["anyOf"][1:]
    return alternatives


@pytest.mark.slow
@pytest.mark.parametrize(("section", "kind"), [*_SECTIONS, ("AugmentConfig", "augmentations"), ("ReporterConfig", "reporters")])
def test_the_schema_knows_every_name_once(section: str, kind: str) -> None:
    known = [name for alternative in _alternatives(section) for name in alternative["properties"]["name"]["enum"]]
    expected = [*names(kind), *(["auto"] if kind == "averagers" else [])]  # which is none, and leaves it to the run
    assert (sorted(known), SCHEMA[section]["anyOf"][0]["enum"]) == (sorted(expected), expected)


def test_the_schema_lets_sections_be_left_to_the_run() -> None:
    schema = SCHEMA
    assert [schema[section]["anyOf"][0]["const"] for section in ("GridConfig", "PlanConfig")] == ["auto", "auto"]
    assert set(schema["GridConfig"]["anyOf"][1]["properties"]) == {"rows", "cols", "tiles"}
    assert "default" in schema["PlanConfig"]["anyOf"][1]["properties"]


def test_an_open_averager_is_filled_with_nothing() -> None:
    config, source = load(CONFIGS[0], ["averager=auto", "grid=auto", "plan=auto"])
    check_config(config, source)
    assert filled(config).automatic == ("grid", "plan", "averager")
    assert (filled(config).averager.options, parse(dump(filled(config)))[0]) == ({}, filled(config))


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_has_the_options_of_the_shipped_configurations(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    for section in SECTIONS:
        value = written.get(section)
        if isinstance(value, dict):
            fits = [a for a in _alternatives(f"{section.capitalize()}Config") if value["name"] in a["properties"]["name"]["enum"]]
            assert len(fits) == 1
            assert set(value) <= set(fits[0]["properties"])
            assert set(fits[0]["required"]) <= set(value)
            assert all("description" in entry for entry in fits[0]["properties"].values())


@pytest.mark.parametrize("section", [section for section, _ in _SECTIONS])
def test_the_schema_lets_code_of_the_users_have_any_options(section: str) -> None:
    alone, whole = SCHEMA[section]["anyOf"][-2:]
    for reference in ("my_code:Own", "code/my_code.py:Own"):
        assert re.fullmatch(alone["pattern"], reference)
    assert not any(re.fullmatch(alone["pattern"], name) for name in ("sgd", ":x", "a:", "a:b.c"))
    assert whole["properties"]["name"] == alone
    assert whole["additionalProperties"] is True


FAULTS = {
    "data.mixing.mixup=0.2": r"^data\.mixing mixes labels, but the loss of backend cuda does not support",
    "progress=thread": r"^progress is thread, but backend cuda enqueues .*; set progress to test, or",
    "averager={name: sharded, wire_parameters: bfloat16}": r"^averager\.wire_parameters is bfloat16, but .*; set it to float32",
}


@pytest.mark.parametrize("override", FAULTS)
def test_an_option_that_a_device_does_not_take_is_refused(cuda_kernels: CudaKernelsFactory, override: str) -> None:
    for backend in ("cuda", "auto"):
        config, _ = parse(TEXT, overrides=(override, f"backend={backend}"))
        assert len(list(device_faults(config))) == (backend == "cuda")
        check_device(config, NumpyKernelSet())
        with pytest.raises(ConfigError, match=FAULTS[override]):
            check_device(config, cuda_kernels())


@pytest.mark.parametrize(
    "override", ["progress=none", "averager={name: sharded, wire: bfloat16}", "averager=lazy", "grid.rows=2"]
)
def test_options_that_a_device_takes_are_no_faults(cuda_kernels: CudaKernelsFactory, override: str) -> None:
    config, _ = parse(TEXT, overrides=(override, "backend=cuda"))
    assert list(device_faults(config)) == []
    check_device(config, cuda_kernels())


@pytest.mark.parametrize(
    ("causes", "words"),
    [
        ({"data.validation": (None, 0.1)}, "data.validation: not set -> 0.1 (may not change: samples that the model"),
        ({"seed": (0, 1), "data.validation": (0.1, 0.2)}, "seed: 0 -> 1, data.validation: 0.1 -> 0.2 (may not change: samples"),
        ({}, "validation samples: a -> b (may not change: samples"),
    ],
)
def test_other_validation_samples_are_refused_by_the_keys_that_they_depend_on(causes: dict[str, Any], words: str) -> None:
    """The message does not name held_out, which is no key of a configuration."""
    differences = [Change("held_out", "a", "b"), *(Change(key, *values) for key, values in causes.items())]
    with pytest.raises(CheckpointError) as caught:
        check(differences, between_epochs=True, begun_epochs=0, place="there")
    assert words in str(caught.value)
    assert "held_out" not in str(caught.value)


def test_words_of_the_field_mean_keys_options_and_commands_that_exist() -> None:
    """No suggestion is refused in turn after a key or an option has been renamed."""
    known = {".".join(map(str, path)) for path in known_paths()}
    known |= {
        f"{section}.{option}" for section, kind in SECTIONS.items() for one in choices(kind) for option in _option_names(one)
    }
    known |= {f"model.{option}" for option in FOLLOWING} | {name for kind in KINDS for name in names(kind)}
    known |= set(cli.list_commands(click.Context(cli))) | {"auto", "bfloat16", "cuda", "float32", "onednn"}
    assert set(SYNONYMS) <= known
    assert all(synonyms(word) and synonyms(word.upper().replace("_", "-")) for of_key in SYNONYMS.values() for word in of_key)


def _option_names(described: Choice) -> set[str]:
    return {option.name for option in described.options}


@pytest.mark.parametrize(
    ("override", "option", "replacement"),
    [
        ("optimizer.name=adam", "momentum", "optimizer={name: adam, lr: 0.1}"),
        ("schedule.name=cosine", "milestones_epochs", "schedule={name: cosine}"),
        ("data.augment.0.name=flip", "padding", "data.augment.0={name: flip}"),
        ("model.name=vgg11", "stochastic_depth", "model={name: vgg11}"),
    ],
)
def test_an_override_of_a_name_alone_is_answered_by_one_of_the_section(override: str, option: str, replacement: str) -> None:
    """The message names no line of the file as faulty that is correct without the override. Its advice is accepted."""
    text = TEXT.replace("width: 0.5", "stochastic_depth: 0.2")
    (message,) = faults(text, override)
    assert (
        f'no option "{option}"; override "{override}" keeps the other keys of the section, so write "{replacement}".' in message
    )
    passes(text, replacement)
    assert "keeps" not in faults(text, override, replacement, f"{replacement.partition('=')[0]}.{option}=3")[0]


_NEEDED = [(kind, name) for kind in KINDS for name in names(kind) if any(option.needed for option in choice(kind, name).options)]


@pytest.mark.parametrize(("kind", "name"), _NEEDED)
def test_a_missing_option_is_answered_by_an_example_that_is_accepted(kind: str, name: str) -> None:
    """The error of each option without a default shows how to write its value."""
    text = (TOP / "configs" / "quickstart.yaml").read_text()
    section = next((key for key, of_key in SECTIONS.items() if of_key == kind), None)
    for override in (f"{section}.name={name}", f"{section}={name}") if section else (f"data.augment=[{name}]",):
        (message,) = faults(text, override)
        example = re.search(r'needs the option "\w+"; write for example "([^"]*)"\.$', message)
        assert example is not None, message
        passes(text, override, example[1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a model, a backend, an optimiser, a strategy and the options of an averager were made."""
    counts: Counter[str] = Counter()

    def counted(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            counts[kind] += 1
            return make(*arguments, **keywords)

        return counting

    monkeypatch.setattr(catalogue, "build", counted(catalogue.build, "model"))
    for module in (planned_run, session, python_job, automatic_search):
        monkeypatch.setattr(module, "make_backend", counted(make_backend, "backend"))
    monkeypatch.setattr(OPTIMIZERS, "create", counted(OPTIMIZERS.create, "optimizer"))
    monkeypatch.setattr(AveragerChoice, "strategy", counted(AveragerChoice.strategy, "strategy"))
    monkeypatch.setattr(averagers, "check_options", counted(averagers.check_options, "options"))
    return counts


@pytest.mark.parametrize(
    ("command", "backends", "optimizers", "strategies"),
    [(["config", "check"], 0, 1, 0), (["plan", "show", "--ranks", "1"], 1, 2, 1)],
)
def test_a_command_makes_a_model_for_the_usual_images_and_one_for_those_of_the_file(
    command: list[str], backends: int, optimizers: int, strategies: int, tmp_path: Path, made: Counter[str]
) -> None:
    run_in_process.prepare(tmp_path)
    result = CliRunner().invoke(cli, [*command, str(tmp_path / "tiny.yaml")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert made == Counter(model=2, backend=backends, optimizer=optimizers, strategy=strategies, options=1 + strategies)


@pytest.mark.job  # it asks git for the revision
def test_a_training_makes_each_part_once_after_its_check(tmp_path: Path, made: Counter[str]) -> None:
    """A network that is not split has one group of parameters."""
    run_in_process.prepare(tmp_path)
    hpctrain.train(tmp_path / "tiny.yaml", style="none")
    assert made == Counter(model=2, backend=1, optimizer=2, strategy=1, options=1)


def test_a_replica_of_a_program_uses_the_model_that_it_is_given(made: Counter[str]) -> None:
    with hpctrain.start(batch=8) as job:
        job.replica(nets.plain(), (9, 7, 3), backend="numpy")
    assert made == Counter(backend=1, optimizer=1, strategy=1, options=1)


def test_a_replica_with_a_search_uses_the_backend_of_the_search(made: Counter[str]) -> None:
    automatic = hpctrain.Automatic(nets.plain(), (9, 7, 3), backend="numpy", machine="xc40")
    with hpctrain.start(batch=8, automatic=automatic) as job:
        job.replica(automatic.model, (9, 7, 3), backend="numpy", averager="auto", plan="auto")
    assert made["backend"] == 1

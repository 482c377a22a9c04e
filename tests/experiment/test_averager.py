"""One way to make an averager: what it refuses is refused alike in a check, in a plan and in a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.averaging.strategy import Strategy
from hpctrain.cli.main import cli
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment import averager
from hpctrain.experiment.dry_run import group_schedules, prepare
from hpctrain.experiment.grid import splits_parameters
from hpctrain.registry import Registry

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
SMALL = ("model={name: vgg11, width: 0.05}", "batch=14", "backend=numpy", "grid.rows=2", "grid.cols=1")
SPLIT = ("plan.classifier.*=model",)
WHOLE = ("plan.features.*=domain",)
NORMS = {"lars": "optimizer={name: lars, lr: 0.1}", "clipping": "optimizer={name: sgd, lr: 0.1, clip_norm: 1.0}"}
NO_NORMS = "optimizer={name: sgd, lr: 0.1}"
SENTENCE = (
    "The averager plain adds up no norms (its class does not set adds_norms), which optimizer.clip_norm and lars need; leave "
    "clip_norm out and use sgd, or use another averager."
)

#: a strategy of somebody's own that has never heard of norms
PLAIN = """
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategy import Strategy

class PlainAverager(GradientAverager):
    def begin_step(self, lr, counts=None): ...
    def grad_ready(self, parameter): ...
    def end_backward(self): ...
    def before_forward(self, parameters): ...
    def drain(self): ...

class Plain(Strategy):
    def __init__(self, group, *, pieces: int = 1) -> None:
        super().__init__(group)

    def averager(self, setup, agreement):
        return PlainAverager(setup)
"""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Overrides for a strategy that adds up no norms."""
    package = tmp_path / "own_strategies"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(averager, "AVERAGERS", Registry("own_strategies", "averager", Strategy))
    return (*SMALL, "averager=plain")


def _check(*overrides: str) -> None:
    """As `hpctrain config check` does."""
    result = CliRunner().invoke(cli, ["config", "check", str(CONFIG), *overrides])
    if result.exit_code:
        assert result.exit_code == 2, result.output
        raise ConfigError(result.stderr)


def _plan(command: str) -> Callable[..., None]:
    def run(*overrides: str) -> None:
        result = CliRunner().invoke(cli, ["plan", command, str(CONFIG), *overrides, "--image", "35", "35", "3", "--classes", "9"])
        if result.exit_code:
            assert result.exit_code == 2, result.output
            assert result.stdout == ""
            raise ConfigError(result.stderr)

    return run


def _schedules(*overrides: str) -> None:
    """The plan itself, without the command's checks before it."""
    config, _ = load(CONFIG, overrides)
    group_schedules(prepare(config, 2, (35, 35, 3), 9), LinkModel(1e-5, 1e-9))


@pytest.mark.parametrize("use", [_check, _plan("show"), _plan("schedule"), _schedules], ids=["check", "show", "schedule", "plan"])
def test_norms_that_nobody_adds_up_are_refused_in_one_sentence_everywhere(
    plain: tuple[str, ...], use: Callable[..., None]
) -> None:
    for norms in NORMS.values():
        for layers in (SPLIT, WHOLE, (*SPLIT, "grid.rows=1", "grid.cols=2")):
            with pytest.raises(ConfigError) as caught:
                use(*plain, norms, *layers)
            assert str(caught.value).strip().endswith(SENTENCE)
            assert len(str(caught.value).strip().splitlines()) == 1
    for layers in (SPLIT, WHOLE):
        use(*plain, NO_NORMS, *layers)


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        (SPLIT, True),
        (WHOLE, False),
        (("plan.default=model",), True),
        (("plan.default=model", "grid.rows=1"), False),
        (("plan.features.*=model", "plan.features.*=batch"), False),
        (("plan.features.1=model",), False),  # a ReLU
        ((*SPLIT, "model.width=-1"), False),  # a fault of its own
        ((*SPLIT, "grid.tiles=[3, 2]"), False),
    ],
)
def test_it_is_known_before_a_run_whether_parameters_are_split(overrides: tuple[str, ...], split: bool) -> None:
    config, _ = load(CONFIG, [*SMALL, *overrides])
    assert splits_parameters(config) is split

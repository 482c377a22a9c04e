"""Sections that are left open: no default, kept as they are, and ended by whatever is given."""

from hpctrain.config.schema import Config

SMALL = {
    "model": "small",
    "data": {"train": "train.h5"},
    "batch": 8,
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": "constant",
}


def test_sections_can_be_left_to_the_start_of_a_run():
    config = Config.model_validate({**SMALL, "grid": "auto", "plan": "auto", "averager": "auto"})
    assert config.automatic == ("grid", "plan", "averager")
    assert (config.grid.rows, config.plan.patterns) == (1, {})
    assert Config.model_validate(SMALL).automatic == ()
    assert Config.model_validate({**SMALL, "plan": "auto"}).automatic == ("plan",)


def test_what_is_left_open_is_no_default():
    for section in ("grid", "plan", "averager"):
        config = Config.model_validate({**SMALL, section: "auto"})
        assert config != Config.model_validate(SMALL)
        assert Config.model_validate(config.model_dump(mode="json")) == config
        assert config.model_copy(update={"batch": 9}).automatic == (section,)
        assert (
            Config.model_validate(
                {**config.model_dump(mode="json"), section: {"name": "blocking"} if section == "averager" else {}}
            ).automatic
            == ()
        )

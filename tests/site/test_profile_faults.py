"""Faults of site profiles: one sentence each, with the value, the rule and the nearest legal value."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hpctrain.site.profile import SiteProfile
from hpctrain.site.profile_faults import faults

GOOD = {"description": "a machine", "tested": "here", "scheduler": "slurm", "node": {"cores": 8, "ranks": 2}}


@pytest.mark.parametrize(
    ("changes", "path", "sentence"),
    [
        ({"queu": {}}, "queu", 'Unknown key "queu"; the nearest is "queue"'),
        ({"node": {"cores": 8, "ranks": 2, "most_rank": 1}}, "node.most_rank", 'the nearest is "most_ranks"'),
        ({"node": {"core": 8, "ranks": 2}}, "node.core", 'Unknown key "node.core"; the nearest is "cores"'),
        ({"node": {"cores": 8}}, "node.ranks", 'The key "node.ranks" is missing: Number of ranks on each node'),
        ({"node": {"cores": 8, "ranks": 9}}, "node", "node must have ranks of at most 8; the nearest legal value is 8."),
        (
            {"node": {"cores": 0, "ranks": 1}},
            "node.cores",
            "is 0, but must be at least 1; the nearest legal value is 1.",
        ),
        (
            {"scheduler": "slrum"},
            "scheduler",
            "must be 'slurm', 'pbs', 'hostfile' or 'local'; the nearest is 'slurm'",
        ),
        ({"time": "soon"}, "time", "time is soon, but must be a time such as 06:00:00."),
        ({"description": "a\nb"}, "description", "must be text in one line without control characters; it has U+000A"),
        ({"environment": {"A": {"value": 'a"b', "why": "w"}}}, "environment.A.value", "must be text without quotes"),
        ({"environment": {"A": {"value": "$(id)", "why": "w"}}}, "environment.A.value", "must be text without quotes"),
        ({"environment": {"A;id": {"value": "1", "why": "w"}}}, "environment.A;id.[key]", "must be the name of a variable"),
        ({"environment": {"A": {"valeu": "1", "why": "w"}}}, "environment.A.valeu", 'the nearest is "value"'),
        ({"directives": {"--x": {"source": "s"}}}, "directives.--x.why", "is missing: Reason"),
        ({"setup": [{"comand": "module load x", "why": "w"}]}, "setup.0.comand", 'the nearest is "command"'),
        ({"gpu": {"vendor": "nvidia", "variable": "V", "order": []}}, "gpu.order", "at least 1 item"),
        ({"scratch": {"directory": "`pwd`"}}, "scratch.directory", "without quotes, backticks, backslashes"),
    ],
)
def test_a_fault_is_one_sentence(changes: dict[str, object], path: str, sentence: str) -> None:
    with pytest.raises(ValidationError) as error:
        SiteProfile.model_validate({**GOOD, **changes})
    ((place, said),) = faults(error.value)
    assert ".".join(map(str, place)) == path
    assert sentence in said
    assert said.endswith(".")


def test_a_profile_is_a_mapping() -> None:
    with pytest.raises(ValidationError) as error:
        SiteProfile.model_validate("slurm")
    ((place, said),) = faults(error.value)
    assert place == ()
    assert said == "A site profile must be a mapping of keys such as description, scheduler, node; it is slurm."

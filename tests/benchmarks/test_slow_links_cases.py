"""The cases of the benchmark of slow links: names, variants that exist, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.shapes import SHAPES
from benchmarks.slow_links_cases import ALONE, CASES, DENSE, DENSITIES, WIRE, Case, choice, named, possible


def test_every_case_has_a_name_of_its_own_and_a_network_that_there_is() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.model for case in CASES} <= SHAPES.keys()
    assert all(ALONE in case.variants for case in CASES)


def test_words_choose_cases() -> None:
    assert named([]) == CASES
    assert all("200mbit" in case.name for case in named(["200mbit"]))
    assert len(named(["slow-vgg16-4x1-200mbit", "shared-memory"])) == 3
    with pytest.raises(ValueError, match="no case has 3gbit in its name"):
        named(["200mbit", "3gbit"])


def test_cases_at_200_megabits_have_all_rounds_and_others_a_third() -> None:
    assert {case.rounds(9) for case in CASES if case.share == 1} == {9}
    assert {case.rounds(9) for case in CASES if case.share < 1} == {3}
    assert {case.rounds(2) for case in CASES} == {2}


def test_all_dense_variants_can_be_made_on_the_ranks_of_every_case() -> None:
    for case in CASES:
        made, refused = possible(case)
        assert made.keys() | refused.keys() == case.variants.keys()
        assert not refused.keys() & {ALONE, *DENSE}, refused


def test_a_variant_that_does_not_exist_is_left_out_with_the_reason() -> None:
    case = Case("slow", "vgg16", 4, 1, "1gbit", {ALONE: None, "new": {"name": "sharded", "colour": "red"}})
    made, refused = possible(case)
    assert list(made) == [ALONE]
    assert "colour" in refused["new"]


def test_what_is_kept_behind_the_screen_is_among_the_variants() -> None:
    rule = named(["4x1-200mbit"])[0].screen
    assert rule is not None
    assert set(rule["best_of"]) == set(DENSE)
    assert {name for names in rule["with"].values() for name in names} == set(WIRE)
    assert next(case for case in CASES if case.kind == "priority").screen is None


def test_ranks_of_a_host_are_neighbours() -> None:
    assert Case("slow", "vgg16", 2, 2, "1gbit", {}).nodes == (0, 0, 1, 1)


def test_a_section_is_a_name_and_options() -> None:
    assert choice({"name": "sharded", "replan": False}) == ("sharded", {"replan": False})
    assert sorted(DENSITIES.values()) == list(DENSITIES.values())

from hpctrain.report.differences import ABSENT, ComparedSetting, differences, side_by_side


def test_all_keys_are_side_by_side_in_the_order_of_their_appearance() -> None:
    settings = side_by_side([{"a": "1", "b": "2"}, {"b": "3", "c": "4"}])
    assert settings == (
        ComparedSetting("a", ("1", ABSENT)),
        ComparedSetting("b", ("2", "3")),
        ComparedSetting("c", (ABSENT, "4")),
    )


def test_differences_leave_out_what_is_alike() -> None:
    assert differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]) == (ComparedSetting("b", ("2", "3")),)
    assert differences([{"a": "1"}]) == ()

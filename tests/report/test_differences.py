from hpctrain.report.differences import ABSENT, Setting, differences, side_by_side


def test_all_keys_are_side_by_side_in_the_order_of_their_appearance() -> None:
    settings = side_by_side([{"a": "1", "b": "2"}, {"b": "3", "c": "4"}])
    assert settings == (Setting("a", ("1", ABSENT)), Setting("b", ("2", "3")), Setting("c", (ABSENT, "4")))


def test_differences_leave_out_what_is_alike() -> None:
    assert differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]) == (Setting("b", ("2", "3")),)
    assert differences([{"a": "1"}]) == ()

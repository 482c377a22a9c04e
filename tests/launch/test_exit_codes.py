"""Exit codes: each means one thing, and the page for users lists them."""

from __future__ import annotations

from pathlib import Path

from hpctrain.launch import exit_codes

CODES = {name: value for name, value in vars(exit_codes).items() if name.isupper()}


def test_each_code_means_one_thing_and_none_can_be_a_signal() -> None:
    assert len(set(CODES.values())) == len(CODES)
    below = [code for name, code in CODES.items() if name != "SIGNALLED"]
    assert all(0 <= code < exit_codes.SIGNALLED for code in below)
    assert not {126, 127} & set(below), "the shell says with these that there is no such command"


def test_the_page_lists_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    for name, code in CODES.items():
        assert f"| {'128 + n' if name == 'SIGNALLED' else code} |" in page, name

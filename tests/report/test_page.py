"""The page: well-formed, and whole without anything else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from hpctrain.experiment.judgement import JudgedImage, Judgement
from hpctrain.report.contents import report_page
from hpctrain.report.judged_set import result_of
from hpctrain.report.page import html
from hpctrain.report.record import read_runs
from tests.support.written_runs import confusion_of, write_run, write_trace

VOID = {"meta", "link", "img", "br", "input"}
EVIL = '</script><script>alert("x")</script>'


class Checker(HTMLParser):
    """Collects elements that are not closed in order, and all names and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder, config=f"name: '{EVIL}'\nbatch: {batch}\n") for batch in (8, 16)]
    write_trace(runs[0])
    confusion = confusion_of([[5, 1], [0, 4]])
    image = JudgedImage(3, np.zeros((4, 5, 1), np.uint8), 0, 1, 0.75)
    judgement = Judgement(Path("checkpoint-00000001.h5"), (EVIL, "dog & cat"), confusion, (), (image,))
    return html(report_page(read_runs([run.path for run in runs]), [result_of("quick", judgement)]))


def test_elements_are_closed_and_names_are_there_once(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert (checker.faults, checker.open) == ([], [])
    assert len(checker.ids) == len(set(checker.ids))
    inside = {address[1:] for address in checker.addresses if address.startswith("#")}
    assert inside <= set(checker.ids)
    assert checker.tags.count("h1") == 1


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert all(address.startswith(("#", "data:")) for address in checker.addresses)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text
    assert "url(http" not in text


def test_texts_of_users_are_no_elements(text: str) -> None:
    assert EVIL not in text
    assert "alert(" in text
    assert "dog &amp; cat" in text

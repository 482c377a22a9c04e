"""A report in a real browser, light and dark, wide and narrow: its figures appear, and its console stays empty."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")
pytest.importorskip("playwright", reason="Playwright is not installed (make browser installs it)")

from playwright.sync_api import sync_playwright

from hpctrain.cli.runs import write_report
from tests.support.runs import write_run, write_trace

BROWSER = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.job,
    pytest.mark.skipif(BROWSER is None, reason="there is no browser (make browser installs Chromium where root and apt-get are)"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, one of them traced."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder, config=f"batch: {batch}\n") for batch in (8, 16)]
    write_trace(runs[0])
    write_report([run.path for run in runs], folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_shown_without_an_error(browser: Any, report: Path, scheme: str, width: int) -> None:
    errors: list[str] = []
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else errors.append(request.url))
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    images = page.locator("figure img")
    assert images.count() == 7
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    page.click("nav a[href='#settings']")
    assert page.evaluate("location.hash") == "#settings"
    page.click("summary >> nth=0")
    assert page.locator("details >> nth=0").get_attribute("open") is not None
    page.close()
    assert errors == []

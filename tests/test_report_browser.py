"""The HTML report in a real browser: nothing in the console, and everything that can be touched works.

Chromium is driven through chromedriver's own HTTP interface, which needs no package.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigstep.records import read_run
from bigstep.report.html import write_html
from test_report import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver on the PATH to look at the page"
)
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage",
]  # fmt: skip


class Browser:
    """One Chromium session; `run` executes JavaScript in the page."""

    def __init__(self, profile: Path) -> None:
        assert DRIVER
        assert CHROMIUM
        for _ in range(10):  # it takes a free port, and gives up if the other protocol's of that number is not
            self._driver = subprocess.Popen(
                [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._driver.stdout
            told = (re.search(r"on port (\d+)\.", line) for line in self._driver.stdout)
            port = next((found[1] for found in told if found), None)
            if port:
                break
            self._driver.wait()
            self._driver.stdout.close()
        self._base = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*QUIET, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._base += "/" + session["sessionId"]

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=50) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        self._send("DELETE", "")
        self._driver.terminate()
        self._driver.wait()
        assert self._driver.stdout
        self._driver.stdout.close()

    def cdp(self, command: str, **params: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Open a page at a width, wait until its charts stand, and check that its console is empty."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.prefer(dark)
        self._send("POST", "/url", {"url": "about:blank"})
        self._send("POST", "/se/log", {"type": "browser"})
        self._send("POST", "/url", {"url": page.resolve().as_uri()})
        self.wait("document.documentElement.dataset.ready === 'yes' || !document.querySelector('#trouble').hidden")
        assert self.run("return document.querySelector('#trouble').textContent") == ""

    def prefer(self, dark: bool) -> None:
        """Be a reader of the light or dark scheme who likes no moving pages, which would move under the clicks."""
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in wishes.items()])

    def wait(self, condition: str) -> None:
        script = f"const done = arguments[0]; const look = () => ({condition}) ? done() : setTimeout(look, 20); look();"
        self._send("POST", "/execute/async", {"script": script, "args": []})

    def run(self, script: str) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        return [f"{entry['level']}: {entry['message']}" for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def point(self, x: float, y: float) -> None:
        """Move the mouse there, in two steps as a hand does."""
        for at in ((x - 3, y - 3), (x, y)):
            self.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def click(self, selector: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{next(iter(found.values()))}/click", {})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for recipe, top in (("lars", 0.89), ("plain", 0.85), ("<img src=x onerror=alert(1)>", 0.7)):
        for seed in range(3):
            write_run(folder / f"{top}-{seed}", recipe=recipe, seed=seed, top=top + 0.001 * seed)
    path = folder / "report.html"
    write_html([read_run(found.parent) for found in sorted(folder.glob("*/run.json"))], path)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_opens_without_a_word_in_the_console_and_fits(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.show(page, width, dark=dark)
    assert browser.console() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") >= 7
    assert browser.run("return document.querySelectorAll('img').length") == 0, "a hostile name must stay text"
    ink = browser.run("return getComputedStyle(document.querySelector('#loss .xtick text')).fill")
    assert ink == ("rgb(164, 171, 182)" if dark else "rgb(89, 97, 109)"), "charts must follow the colour scheme"


def test_hovering_a_curve_shows_a_label(browser: Browser, page: Path) -> None:
    browser.show(page, 1400)
    place = browser.run(
        "const plot = document.querySelector('#accuracy-time .plot'); plot.scrollIntoView({block: 'center'});"
        "const points = [...plot.querySelectorAll('.point')];"
        "const box = points[points.length >> 1].getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]"
    )
    browser.point(*place)
    browser.wait("document.querySelector('#accuracy-time .hoverlayer').textContent.includes('%')")
    assert "lars" in browser.run("return document.querySelector('#accuracy-time .hoverlayer').textContent")


def test_a_chip_hides_its_group_in_every_chart_and_brings_it_back(browser: Browser, page: Path) -> None:
    browser.show(page, 1400)
    drawn = (
        "return ['loss', 'accuracy-time', 'finals'].map((key) => document.querySelector(`#${key} .plot`).data"
        ".filter((trace) => trace.meta.group === 0).every((trace) => trace.visible !== false))"
    )
    assert browser.run(drawn) == [True, True, True]
    browser.click(".chips [data-group='0']")
    browser.wait("document.querySelector('#finals .plot').data[0].visible === false")
    assert browser.run(drawn) == [False, False, False]
    assert browser.run("return document.querySelector(\".chips [data-group='0']\").ariaPressed") == "false"
    browser.click("#all-groups")
    browser.wait("document.querySelector('#finals .plot').data[0].visible === true")
    assert browser.run(drawn) == [True, True, True]


def test_a_table_sorts_by_a_click_both_ways_and_filters(browser: Browser, page: Path) -> None:
    browser.show(page, 1400)
    column = (
        "return [...document.querySelectorAll(\"[data-grid='runs'] tbody tr\")]"
        ".map((row) => parseFloat(row.cells[3].textContent))"
    )
    head = "[data-grid='runs'] th:nth-child(4) button"
    browser.click(head)
    falling = browser.run(column)
    assert falling == sorted(falling, reverse=True)
    browser.click(head)
    assert browser.run(column) == sorted(falling)
    assert browser.run(f'return document.querySelector("{head}").parentElement.ariaSort') == "ascending"
    browser.run(
        "const field = document.querySelector(\"[data-filter='runs']\"); field.value = 'plain';"
        "field.dispatchEvent(new Event('input'))"
    )
    assert len(browser.run(column)) == 3


def test_a_link_in_the_table_opens_what_stands_behind_the_number(browser: Browser, page: Path) -> None:
    browser.show(page, 1400)
    assert not browser.run("return document.querySelector('#group-1').open")
    browser.click("[data-grid='groups'] tbody tr:nth-child(2) a")
    browser.wait("document.querySelector('#group-1').open")
    assert "plain" in browser.run("return document.querySelector('#group-1 summary').textContent")
    browser.wait("document.querySelector('#group-1').getBoundingClientRect().top < innerHeight")


def test_the_colours_follow_when_the_reader_switches_to_dark(browser: Browser, page: Path) -> None:
    browser.show(page, 1400)
    browser.prefer(dark=True)
    browser.wait("getComputedStyle(document.querySelector('#loss .xtick text')).fill === 'rgb(164, 171, 182)'")
    assert browser.console() == []

"""The planner's page in a real browser: its model equals Python's, its controls work at desktop and phone width."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigstep.plan import Cluster, Scheme, Workload, cli_result, predict
from bigstep.plan.crossover import find_crossover
from bigstep.plan.page import page_facts, write_page
from bigstep.plan.workload import Layer

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    not (DRIVER and BROWSER), reason="needs chromedriver and chromium (or google-chrome) on the path"
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]  # fmt: skip
ARROW_RIGHT, ARROW_LEFT = "\ue014", "\ue012"


class Browser:
    """The few calls of the WebDriver protocol that these tests need."""

    def __init__(self, port: int, profile: str, shots: str = "") -> None:
        self.root, self.shots = f"http://127.0.0.1:{port}", shots
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": BROWSER}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.session = "/session/" + self.call("POST", "/session", wanted)["sessionId"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=40) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def open(self, url: str, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        self.call("POST", f"{self.session}/url", {"url": url})
        ready = "const done = arguments[0]; const look = () => document.documentElement.dataset.ready ? done() : "
        self.call(
            "POST", f"{self.session}/execute/async", {"script": f"{ready}setTimeout(look, 20); look();", "args": []}
        )

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self.call("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def press(self, element_id: str, keys: str) -> None:
        found = self.call("POST", f"{self.session}/element", {"using": "css selector", "value": f"#{element_id}"})
        self.call("POST", f"{self.session}/element/{next(iter(found.values()))}/value", {"text": keys})
        # the page redraws in the next frame
        self.call("POST", f"{self.session}/execute/async", {"script": "requestAnimationFrame(() => "
                  "requestAnimationFrame(() => arguments[0]()))", "args": []})  # fmt: skip

    def text(self, element_id: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", element_id))

    def photograph(self, name: str) -> None:
        if self.shots:
            shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
            Path(self.shots, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert DRIVER
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver,
    ):
        assert driver.stdout
        # the driver says where it listens
        port = next(int(found[1]) for line in driver.stdout if (found := re.search(r"on port (\d+)\.", line)))
        session = None
        try:
            session = Browser(port, profile, os.environ.get("BIGSTEP_SCREENSHOTS", ""))
            yield session
        finally:
            if session:
                session.call("DELETE", session.session)
            driver.terminate()
            driver.stdout.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    write_page(cli_result(cluster="abci", gpus=2048), path, model="resnet50", cluster="abci")
    return path


def test_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    own = text[: text.index("<script>")] + text[text.rindex("const planner") :]
    assert "http://" not in own
    assert "https://" not in own
    assert "default-src 'none'" in text


@needs_browser
def test_model_in_the_page_equals_python(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), 1400)
    asks = [
        {"devices": devices, "localBatch": local, "collective": collective, "codec": codec, "bucketMb": bucket,
         "bandwidth": bandwidth}
        for devices in (1, 2, 4, 6, 64, 352, 2048, 4096)
        for local in (4, 32)
        for collective, codec in (("ring", "none"), ("torus", "fp16"), ("hierarchical", "fp16"), ("halving", "none"),
                                  ("hybrid", "fp16"), ("gather", "onebit"), ("switch", "fp16"))
        for bucket in (1, 64)
        for bandwidth in (1e8, 1.25e10)
        if not (collective in ("hierarchical", "hybrid") and devices == 6)
    ]  # fmt: skip
    models = {"abci": "resnet50", "dgx_h100": "lstm", "tencent_p40": "resnet50", "dgx_h200": "gpt-10m"}
    for name, model in models.items():
        workload, cluster = Workload.load(model), Cluster.load(name).resized(4096)
        if name == "dgx_h200":  # whose input is slower than its devices
            cluster = replace(cluster, loader_samples_s=100.0)
        facts = page_facts(workload, cluster, {"gpus": 2048})
        script = "return arguments[1].map((ask) => planner.predict(arguments[0].model, arguments[0].cluster, ask))"
        answers = browser.run(script, facts, asks)
        for ask, found in zip(asks, answers, strict=True):
            scheme = Scheme(
                collective=ask["collective"],
                codec=ask["codec"],
                bucket_mb=ask["bucketMb"],
                optimizer=workload.optimizer,
            )
            changed = cluster.with_bandwidth(ask["bandwidth"])
            expected = predict(workload, changed, devices=ask["devices"], local_batch=ask["localBatch"], scheme=scheme)
            # 1e-8: Acklam's inverse of the normal distribution; the rest is the same arithmetic
            assert found["step"] == pytest.approx(expected.step_s, rel=1e-8), (name, ask)
            assert found["split"] == pytest.approx(expected.split, rel=1e-6, abs=1e-9)
            assert found["efficiency"] == pytest.approx(expected.efficiency, rel=1e-8)


@needs_browser
def test_layers_without_parameters_do_not_hold_the_last_gradient_back_in_the_page(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), 1400)
    layers = (
        Layer(name="flatten", shapes=(), forward_s=0.1, backward_s=0.2),
        Layer(name="linear", shapes=((1000, 1000),), forward_s=0.1, backward_s=0.2),
    )
    workload = Workload(name="mlp", layers=layers, measured_batch=32)
    cluster = Cluster.load("dgx_h100")
    ask = {"devices": 64, "localBatch": 32, "collective": "ring", "codec": "none", "bucketMb": 64, "bandwidth": 1e7}
    script = "return planner.predict(arguments[0].model, arguments[0].cluster, arguments[1]).step"
    found = browser.run(script, page_facts(workload, cluster, {"gpus": 64}), ask)
    scheme = Scheme(bucket_mb=64, optimizer=workload.optimizer)
    expected = predict(workload, cluster.with_bandwidth(1e7), devices=64, local_batch=32, scheme=scheme)
    assert found == pytest.approx(expected.step_s, rel=1e-8)


@needs_browser
def test_the_page_opens_at_the_plan(browser: Browser, tmp_path: Path) -> None:
    """At a batch that is no power of two, and a rate for which the slider has no place."""
    path, answer = tmp_path / "plan.html", cli_result(cluster="mn1", gpus=128, batch=128 * 40, collective="ring")
    write_page(answer, path, model="resnet50", cluster="mn1")
    browser.open(path.as_uri(), 1400)
    found = browser.run("return planner.predict(facts.model, facts.cluster, chosen())")
    assert found["step"] * 1e3 == pytest.approx(answer["best"]["step_ms"], rel=1e-8)
    browser.press("batch", ARROW_LEFT)
    assert browser.run("return chosen().localBatch") == 32


@needs_browser
def test_crossover_in_the_page_equals_python(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), 1400)
    workload, cluster = Workload.load("resnet50"), Cluster.load("abci")
    ask = {
        "devices": 256,
        "localBatch": 32,
        "collective": "halving",
        "codec": "fp16",
        "bucketMb": 16,
    }
    found = browser.run("return planner.crossover(facts.model, facts.cluster, arguments[0])", ask)
    plain = Scheme(collective="halving", codec="fp16", bucket_mb=16, optimizer="lars")
    onebit = replace(plain, collective="gather", codec="onebit")
    expected = find_crossover(workload, cluster, devices=256, local_batch=32, compressed=[onebit], plain=[plain])
    assert found == pytest.approx(expected.byte_s, rel=1e-6)


@needs_browser
def test_the_page_and_its_words_name_one_crossover(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), 1400)
    told = cli_result(cluster="abci", gpus=2048)["crossover"]["gbit_s"]
    assert f"below {told:.3g} Gbit/s" in browser.text("crossover")
    assert f"below {told:.3g} Gbit/s" in str(browser.run("return document.querySelector('.words').textContent"))


def test_the_page_tells_ways_and_prices_as_the_terminal_does(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    answer = cli_result(cluster="dgx_h100", gpus=64, price=2.5, lifetime_hours=100)
    write_page(answer, path, model="resnet50", cluster="dgx_h100")
    words = path.read_text()
    assert f"Recommended: {answer['recommended']['method']}, since" in words
    assert f"Cheapest: 1 device for {answer['cheapest']['price']:,.2f} in" in words
    for way in answer["ways"]:
        assert f"{way['method']} ({way['label']}): " in words
        assert f"price {way['price']:,.2f}." in words


def test_the_page_marks_what_it_recommends_and_not_what_stands_first(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    answer = cli_result(model="gpt-124m", cluster="dgx_h200", gpus=64)
    assert answer["ranking"][0] != answer["best"], "else nothing is shown here"
    write_page(answer, path, model="gpt-124m", cluster="dgx_h200")
    (marked,) = re.findall(r'<tr class="best"><td>(\w+)</td><td class="text">(\w+)</td>', path.read_text())
    assert ">sequences/s<" in path.read_text()
    assert marked == (answer["best"]["collective"], answer["best"]["codec"])


def test_the_page_speaks_of_devices_and_of_the_model_s_samples(tmp_path: Path) -> None:
    """As the terminal does: a cluster may be of TPUs or CPUs, and a model may read sequences."""
    path = tmp_path / "plan.html"
    write_page(cli_result(model="gpt-124m", cluster="tpu_v3", gpus=64), path, model="gpt-124m", cluster="tpu_v3")
    text = path.read_text()
    own = text[: text.index('<script type="text/plain"')] + text[text.rindex("const planner") :]
    assert "gpt-124m on 64 devices of tpu_v3" in own
    assert '"unit": "sequences"' in own
    assert "images" not in own
    assert "GPU" not in own


def test_less_accuracy_than_the_law_s_is_headlined_as_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_page(cli_result(cluster="abci", gpus=512, target=75), path, model="resnet50", cluster="abci")
    headline = path.read_text().partition("<h1>")[2].partition("</h1>")[0]
    assert ": 75 % in at most " in headline
    assert headline.endswith("which is the time to 75.9 %")
    assert path.stat().st_size < 2_100_000, "the plotting library travels compressed"


@needs_browser
@pytest.mark.parametrize("width", [1400, 390])
def test_moving_a_slider_changes_the_numbers(browser: Browser, page: Path, width: int) -> None:
    browser.open(page.as_uri(), width)
    assert browser.run("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") >= 4
    before = {name: browser.text(name) for name in ("time", "step", "rate", "efficiency", "gpus-value")}
    assert all(before.values())
    browser.press("gpus", ARROW_LEFT * 3)
    after = {name: browser.text(name) for name in before}
    assert int(after["gpus-value"].replace(",", "")) * 8 == int(before["gpus-value"].replace(",", ""))
    assert all(after[name] != before[name] for name in ("time", "rate", "gpus-value"))
    rate = browser.text("rate")
    browser.press("batch", ARROW_RIGHT)
    assert browser.text("rate") != rate
    step = browser.text("step")
    browser.press("bandwidth", ARROW_LEFT * 60)
    slow = browser.text("step")
    assert slow != step
    browser.run(
        "const codec = document.getElementById('codec'); codec.value = 'onebit';"
        "codec.dispatchEvent(new Event('input', {bubbles: true})); update();"
    )
    assert browser.text("step") != slow
    assert browser.run("return document.getElementById('collective').disabled") is True
    browser.run("document.getElementById('restart').click(); update();")
    assert {name: browser.text(name) for name in before} == before
    for scheme in ("light", "dark"):
        browser.devtools(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        browser.run("update()")
        browser.photograph(f"plan-{width}-{scheme}")


@needs_browser
def test_a_model_without_a_law_still_gets_its_page(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "small.html"
    write_page(cli_result(model="small", cluster="dgx_a100", gpus=8), path, model="small", cluster="dgx_a100")
    browser.open(path.as_uri(), 390)
    assert browser.text("time") == "–"
    assert browser.text("rate").endswith("/s")
    assert browser.run("return document.getElementById('accuracy')") is None

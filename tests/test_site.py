"""The documentation site builds without a warning, has a page for every public name, and is read without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import bigstep
from bigstep import recipes
from test_public_names import NAMES

ROOT = Path(__file__).parents[1]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'bigstep[docs]'")


class Page(HTMLParser):
    """What a page names, links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.names.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given or (tag == "link" and "href" in given):
            self.loads.append(given.get("src") or given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built once, with warnings as errors."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr  # not --quiet, which silences strictness too
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site but those that are results themselves, and the one a server shows for a wrong address."""
    own = {path for path in site.rglob("*.html") if "benchmarks/suites" not in str(path) or path.name == "index.html"}
    return {path: Page(path.read_text(encoding="utf-8")) for path in own - {site / "404.html"}}


def test_every_public_name_has_a_documented_place(site: Path, pages: dict[Path, Page]) -> None:
    wanted = {f"{module}.{name}" for module, name in NAMES}
    undocumented = sorted(wanted - {name for page in pages.values() for name in page.names})
    assert undocumented == [], "give their modules a line in MODULES of docs/_site/reference.py"
    listed = (site / "api" / "index.html").read_text()
    assert [name for name in bigstep._PUBLIC if f"<code>bigstep.{name}</code>" not in listed] == []


def test_every_recipe_has_a_page_with_its_evidence(site: Path) -> None:
    for name in recipes.NAMES:
        page = (site / "recipes" / f"{name}.html").read_text()
        assert f"<code>{name}</code>" in page
        assert "preset: mini" in re.sub(r"<[^>]+>", "", page), f"{name} does not show its settings"


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            if not target.is_file() or (known and parts.fragment and unquote(parts.fragment) not in known.names):
                broken.append(f"{path.relative_to(site)} -> {link}")
    assert broken == []


def test_reading_needs_no_network(site: Path, pages: dict[Path, Page]) -> None:
    fetched = {load for page in pages.values() for load in page.loads if urlsplit(load).scheme in ("http", "https")}
    assert fetched == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?https?:", style.read_text()), style.name


def test_the_search_knows_names_guides_and_recipes(site: Path) -> None:
    text = next(site.glob("search/search_index.js*")).read_text()
    titles = {entry["title"] for entry in json.loads(text[text.index("{") : text.rindex("}") + 1])["docs"]}
    titles = {re.sub(r"<[^>]+>|\W+", " ", title).strip() for title in titles}
    assert {"Which way to go", "A tour", "sony"} <= titles
    assert any("LARS" in title for title in titles)

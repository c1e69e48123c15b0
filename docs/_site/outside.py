"""Links from documents to files outside docs/ work in the site as they do on the repository's page.

A Markdown file, program or folder that is linked becomes a page under `source/`, and so does what such a page links to;
data are copied. A link to the package, a module or a recipe leads to its page in the reference. A link to something
that is not there is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
CODE = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
QUOTED = re.compile(r"(^```.*?^```|`[^`\n]*`)", flags=re.M | re.S)
LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
FRONT = "---\nsearch:\n  exclude: true\n---\n\n"
log = logging.getLogger("mkdocs.hooks.outside")
homes: dict[str, str] = {}
"""The folder of the repository that the links of a page start from, by the page's place in the site."""
reference: dict[str, str] = {}
"""Where the reference has a page about a file or folder of the package."""


def on_files(files: Files, config: Any) -> Files:
    """Follow links out of docs/ and add what they lead to."""
    homes.clear()
    waiting: list[str] = []
    for file in files.documentation_pages():
        if file.generated_by:
            for source in sources(file.src_uri):
                reference.setdefault(source, file.src_uri)  # a recipe's own page before that of its module
        else:
            homes[file.src_uri] = posixpath.dirname(f"docs/{file.src_uri}")
            waiting += targets(file.content_string, homes[file.src_uri])
    while waiting:
        path = waiting.pop()
        place = address(path)
        if not place.startswith("source/") or files.get_file_from_path(place) or not (ROOT / path).exists():
            continue
        text = written(path)
        if text is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
            continue
        files.append(File.generated(config, place, content=text))
        if Path(path).suffix not in CODE:
            homes[place] = path if (ROOT / path).is_dir() else posixpath.dirname(path)
            waiting += targets(text, homes[place])
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point the links of a page at where their targets are in the site."""
    uri = page.file.src_uri
    if uri not in homes:
        return markdown

    def pointed(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(homes[uri], found[1]))
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which is not there", uri, found[1])
        return posixpath.relpath(address(target), posixpath.dirname(uri) or ".") + (found[2] or "")

    return links(pointed, markdown)


def targets(text: str, home: str) -> list[str]:
    """Return what a document links to, as paths of the repository."""
    found: list[str] = []
    links(lambda link: found.append(link[1]) or "", text)
    return [posixpath.normpath(posixpath.join(home, each)) for each in found]


def links(change: Callable[[re.Match[str]], str], text: str) -> str:
    """Put every link of a document that is not inside code through `change`."""
    parts = QUOTED.split(text)
    return "".join(part if index % 2 else LINK.sub(change, part) for index, part in enumerate(parts))


def sources(page: str) -> list[str]:
    """Return what a generated page is about.

    >>> sources("recipes/sony.md"), sources("api/index.md"), sources("api/optim.md")
    (['src/bigstep/recipes/sony.py'], ['src/bigstep'], ['src/bigstep/optim', 'src/bigstep/optim.py'])
    """
    part, _, name = page.removesuffix(".md").partition("/")
    if part == "recipes":
        return ["src/bigstep/recipes"] if name == "index" else [f"src/bigstep/recipes/{name}.py"]
    return ["src/bigstep"] if name == "index" else [f"src/bigstep/{name}", f"src/bigstep/{name}.py"]


def address(path: str) -> str:
    """Return where a file of the repository is in the site.

    >>> address("docs/exchange.md"), address("examples/own_loop.py"), address("benchmarks/loop")
    ('exchange.md', 'source/examples/own_loop.py.md', 'source/benchmarks/loop/index.md')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in reference:
        return reference[path]
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    if Path(path).name == "README.md":
        return posixpath.normpath(f"source/{posixpath.dirname(path)}/index.md")
    return f"source/{path}" + (".md" if Path(path).suffix in CODE else "")


def written(path: str) -> str | None:
    """Return the page of a file or folder; None for data, which is copied as it is."""
    here = ROOT / path
    if here.name == "README.md":
        return written(str(here.parent.relative_to(ROOT))) if here.parent != ROOT else here.read_text()
    if here.is_dir():
        readme = here / "README.md"
        entries = [each for each in sorted(here.iterdir()) if not each.name.startswith((".", "__")) and each != readme]
        names = [f"- [`{each.name}{'/' * each.is_dir()}`]({each.name})" for each in entries]
        intro = readme.read_text() if readme.exists() else f"# {path}\n"
        return "\n".join([intro, "## Files", "", *names, ""])
    if here.suffix == ".md":
        return here.read_text()
    if here.suffix in CODE:
        return f"{FRONT}# {path}\n\n````{CODE[here.suffix]}\n{here.read_text()}\n````\n"
    return None

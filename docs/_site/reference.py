"""Pages that are made when the site is built: one for each recipe, one for each public module, and any new guide.

Nothing here is written by hand, so nothing here can fall behind: recipes come from `bigstep.recipes`, names of the API
from each module's `__all__`, texts from docstrings. torch is not imported.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from bigstep import _PUBLIC, recipes  # noqa: E402 - it is not installed where only the site is built
from bigstep.config.text import config_to_yaml  # noqa: E402

MODULES = {
    "train": "Train and load",
    "config": "Configuration of a run",
    "recipes": "Recipes",
    "optim": "Optimizers",
    "schedules": "Schedules",
    "norm": "Batch norm",
    "losses": "Losses",
    "exchange": "The exchange",
    "asynchronous": "Asynchronous training",
    "sparse": "Sparse models",
    "models": "Models",
    "data": "Data",
    "check": "Check",
    "doctor": "Doctor",
    "plan": "The planner",
    "gpu": "Kernels and graphs",
    "records": "Run folders",
    "testing": "In your own tests",
    "errors": "Errors",
}
"""Public modules in the order of the reference; each has a page with every name of its `__all__`."""


def on_config(config: Any) -> Any:
    """Fill the navigation: all recipes, all modules, and guides that nobody has listed."""
    nav = {title: entries for item in config.nav for title, entries in item.items()}
    listed = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    nav["Guides"] += sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in listed)
    groups = {
        "Images": recipes.SYNCHRONOUS,
        "Huge batches": recipes.HUGE,
        "Text": recipes.SEQUENCE,
        "Islands": recipes.ISLANDS,
        "Asynchronous": recipes.ASYNCHRONOUS,
    }
    groups["More"] = tuple(name for name in recipes.NAMES if not any(name in names for names in groups.values()))
    pages = [{group: [{name: f"recipes/{name}.md"} for name in names]} for group, names in groups.items() if names]
    nav["Recipes"] = [{"All recipes": "recipes/index.md"}, *pages]
    nav["API"] = [{"All names": "api/index.md"}, *({title: f"api/{name}.md"} for name, title in modules().items())]
    config.nav = [{title: entries} for title, entries in nav.items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of the package itself."""
    package = griffe.load("bigstep", search_paths=[str(ROOT / "src")], allow_inspection=False)
    pages = {"recipes/index.md": all_recipes(), "api/index.md": all_names(package)}
    pages |= {f"recipes/{name}.md": one_recipe(name) for name in recipes.NAMES}
    pages |= {f"api/{name}.md": one_module(package, name, title) for name, title in modules().items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def modules() -> dict[str, str]:
    """Return the modules that are there, with their titles."""
    there = {path.stem for path in (ROOT / "src" / "bigstep").iterdir()}
    return {name: title for name, title in MODULES.items() if name in there}


# -- the API -----------------------------------------------------------------------------------------------------


def one_module(package: griffe.Module, name: str, title: str) -> str:
    """Return the page of one module: what it is for, then each of its names."""
    module = package[name]
    intro = inspect.cleandoc(module.docstring.value) if module.docstring else ""
    entries = "\n\n".join(f"::: bigstep.{name}.{each}" for each in public_names(module))
    return f"# {title}\n\n`bigstep.{name}`: {intro}\n\n{entries}\n"


def public_names(module: griffe.Module) -> list[str]:
    """Return the names of `__all__`: first those a reader looks for, then constants."""
    names = [str(each) for each in module.exports or [] if each != "__version__"]
    return sorted(names, key=lambda name: (name.isupper() and len(name) > 4, name.lower()))


def all_names(package: griffe.Module) -> str:
    """Return the table of everything public: what `import bigstep` gives first."""
    lines = ["# API reference", "", "What `import bigstep` brings without importing torch until it is used:", ""]
    lines += ["| name | what it is |", "|---|---|"]
    for name, module in _PUBLIC.items():
        home = "exchange" if module == "comm" else module  # where 0.1 had it
        lines.append(row(package, home, name, f"bigstep.{name}"))
    for module, title in modules().items():
        lines += ["", f"## [{title}]({module}.md)", "", "| name | what it is |", "|---|---|"]
        lines += [row(package, module, name, name) for name in public_names(package[module])]
    return "\n".join(lines) + "\n"


def row(package: griffe.Module, module: str, name: str, shown: str) -> str:
    """Return a line of a table: the name, linked, and the first sentence about it."""
    docstring = package[module][name].docstring
    text = inspect.cleandoc(docstring.value).split("\n\n")[0] if docstring else ""
    sentence = " ".join(text.split()).replace("|", "\\|")
    return f"| [`{shown}`]({module}.md#bigstep.{module}.{name}) | {sentence} |"


# -- recipes -----------------------------------------------------------------------------------------------------


def all_recipes() -> str:
    """Return the table of all recipes."""
    lines = [
        "# Recipes",
        "",
        "Published systems as complete configurations. Batch, time and accuracy are the papers' own, on their "
        "hardware. No published ImageNet figure was reproduced here: that takes the authors' clusters.",
        "",
        "```",
        "bigstep train sony                      # on data that ship with the package",
        "bigstep recipes sony --yaml > run.yaml  # edit it, then: bigstep train --config run.yaml",
        "```",
        "",
        "| recipe | what it is | batch | time | top-1 |",
        "|---|---|---|---|---|",
    ]
    for name in recipes.NAMES:
        recipe = recipes.describe(name)
        published = recipe.published
        seconds = "–" if published.seconds is None else f"{published.seconds:,.1f} s".replace(".0 s", " s")
        accuracy = "–" if published.accuracy is None else f"{published.accuracy:.2%}"
        lines.append(f"| [`{name}`]({name}.md) | {recipe.summary} | {published.batch} | {seconds} | {accuracy} |")
    return "\n".join(lines) + "\n"


def one_recipe(name: str) -> str:
    """Return the page of one recipe: its evidence, and its settings on the embedded data."""
    recipe = recipes.describe(name)
    title, _, evidence = recipe.docstring.partition("\n")
    yaml = "\n".join(f"    {line}" for line in config_to_yaml(recipes.load(name)).splitlines())
    presets = ", ".join(f"`{each}`" for each in recipe.presets)
    return "\n".join(
        [
            f"# `{name}`",
            "",
            f"**{title}**",
            "",
            f"Techniques: {', '.join(recipe.techniques)}. Presets: {presets}.",
            "",
            *(section(heading, body, recipe.presets) for heading, body in sections(evidence)),
            '??? example "The preset `mini` as YAML"',
            "",
            "    ```yaml",
            yaml,
            "    ```",
            "",
        ]
    )


def sections(evidence: str) -> list[tuple[str, str]]:
    """Split a recipe's docstring at the lines that are not indented."""
    parts = re.split(r"^(\S.*)$", evidence, flags=re.M)
    return [(heading, inspect.cleandoc(body)) for heading, body in zip(parts[1::2], parts[2::2], strict=True)]


def section(heading: str, body: str, presets: tuple[str, ...]) -> str:
    """Return one section as Markdown: commands as code, a paragraph for each preset."""
    name, _, remark = heading.partition(" (")
    if name == "Launch":
        return f"## {name}\n\n```\n{body}\n```\n"
    starts = "|".join(re.escape(each) for each in presets)
    body = re.sub(rf"\n(?=(?:{starts}|Searched): )", "\n\n", body)
    return f"## {name}\n\n" + (f"*{remark.removesuffix(')')}*\n\n" if remark else "") + f"{body}\n"

"""`bigstep recipes`: the published systems, listed or explained."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, recipe_names
from bigstep.errors import require

__all__ = ["recipes"]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe to explain; without one, all are listed.", autocompletion=recipe_names),
    ] = None,
    preset: Annotated[str, typer.Option(help="Which preset --yaml and --json show.")] = "mini",
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the whole configuration, ready to edit.")] = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or explain one with its evidence.

    \b
    bigstep recipes sony                    # the paper; what is known or chosen
    bigstep recipes sony --yaml > run.yaml  # edit it, then:
    bigstep train --config run.yaml
    """
    from bigstep.config.text import config_to_mapping, config_to_yaml
    from bigstep.recipes import describe, known, load
    from bigstep.report.recipes import print_recipe, print_recipes

    if name is None:
        require(not yaml, "--yaml prints the configuration of one recipe; name it, as in bigstep recipes sony --yaml.")
        descriptions = [describe(each) for each in known()]
        if as_json:
            print_json({"recipes": [dataclasses.asdict(each) for each in descriptions]})
        else:
            print_recipes(descriptions)
        return
    require(not (yaml and as_json), "--yaml and --json both print the configuration; give one of them.")
    config = load(name, preset)
    if yaml:
        typer.echo(config_to_yaml(config), nl=False)
    elif as_json:
        print_json({**dataclasses.asdict(describe(name)), "config": config_to_mapping(config)})
    else:
        print_recipe(describe(name), config_to_mapping(config))

"""`trimaran schema`: prints the JSON Schema of a recipe."""

import json

import typer

from trimaran.core import Recipe


def schema() -> None:
    """Print the JSON Schema of a recipe. Editors use it to complete and check recipes.

    \b
    trimaran schema > recipe.schema.json
    and as the first line of a recipe:
    # yaml-language-server: $schema=recipe.schema.json
    """
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))

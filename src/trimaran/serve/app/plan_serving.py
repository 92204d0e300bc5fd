"""`trimaran plan --serve`: how to serve a model on a cluster, and what it costs."""

import json
from collections.abc import Mapping
from typing import Any

import typer

from trimaran.app.show.clean_console import open_console
from trimaran.core import EXIT_DONE
from trimaran.serve.app.serving_plan_view import show_serving
from trimaran.serve.app.serving_request import (
    ServingOptions,
    read_serving_question,
    refuse_training_options,
    serving_as_dict,
)
from trimaran.serve.planning.serving_plans import plan_serving


def plan_serving_command(
    what: str | None, asked: dict[str, Any], unused: Mapping[str, object], settings: list[str], *, as_json: bool
) -> int:
    """Answer `plan --serve`."""
    refuse_training_options(unused)
    options = ServingOptions(**asked)
    answer = plan_serving(read_serving_question(what, options, settings))
    if as_json:
        typer.echo(json.dumps(serving_as_dict(answer, price=options.price)))
    else:
        show_serving(answer, open_console(), price=options.price)
    return EXIT_DONE

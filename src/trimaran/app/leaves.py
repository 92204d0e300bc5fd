"""Parts of commands that live in a package above this one. They are imported when a user asks for them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

LEAVES = {
    "plan --serve": "trimaran.serve.app.plan_serving:plan_serving_command",
    "bench comm --html": "trimaran.ui.report.comm_page:comm_page",
}


def open_leaf(name: str) -> Callable[..., Any]:
    """Import the function of a leaf."""
    module, function = LEAVES[name].split(":")
    return getattr(import_module(module), function)

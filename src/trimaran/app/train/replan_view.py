"""Prints a change of a running run: the plans before and after, and the answer of the ranks."""

from typing import Any

from rich.console import Console
from rich.table import Table

from trimaran.core import Plan, show_bytes, show_seconds


def show_planned(old: Plan, new: Plan, patch: dict[str, Any], console: Console) -> None:
    """Print both plans with what is predicted for them, and the fields that change."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, plan in (("now", old), ("new", new)):
        table.add_row(name, str(plan))
        if (prediction := plan.prediction) is not None:
            fit = "" if prediction.fits else ", which does not fit"
            cost = f"{show_seconds(prediction.step_seconds)} a step, {show_bytes(prediction.peak_bytes)} a rank{fit}"
            table.add_row("", f"predicted: {cost}")
    table.add_row("change", ", ".join(f"{name}={_shown(value)}" for name, value in patch.items()))
    console.print(table)


def show_answer(answer: dict[str, Any], console: Console) -> None:
    """Print what became of the change."""
    data, step = answer["data"], answer["step"]
    if data["status"] == "applied":
        pause = data["pause_seconds"]  # not known if a rank died after the change, before the answer
        paused = "" if pause is None else f"; training paused for {show_seconds(pause)}"
        console.print(f"applied after step {step}, {data['how']}{paused}")
        return
    console.print(f"change {data['id']} failed after step {step}: {data['error']['what']}")
    console.print("the run goes on with the plan that it had")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

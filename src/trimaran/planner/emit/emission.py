"""What an emitter returns, how it refuses, and how processes are started."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trimaran.core import Plan, TrainSection, UserError
from trimaran.hardware import Cluster
from trimaran.planner.degrees import either
from trimaran.planner.question import Question

PORT = 29500  # torchrun's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """A tool's configuration for a plan: files by name, the command that starts it, and what is left to others.

    Where there are several nodes the command runs on each of them, with `NODE_RANK` and `MASTER_ADDR` set, unless a
    note says otherwise. `notes` tell what the tool or the user's own script decides.
    """

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()


class Takes(NamedTuple):
    """The values of a plan's field that a tool can express, and why it has no others."""

    values: tuple[object, ...]
    why: str


# No tool has these, in a configuration at least.
NOBODY_TAKES: Mapping[str, Takes] = {
    "towers": Takes(({},), "it treats all towers of a model alike"),
    "comm.compression": Takes(("none",), "compressed gradients are a hook in one's own code"),
    "comm.local_steps": Takes((1,), "replicas that train alone are a matter of one's own loop"),
}


def refuse_unless(tool: str, plan: Plan, takes: Mapping[str, Takes]) -> None:
    """Raise for the first field of `plan` that has a value which the tool does not take."""
    for field, (values, why) in {**NOBODY_TAKES, **takes}.items():
        if (value := attrgetter(field)(plan)) not in values:
            words = either("{}" if each == {} else str(each).lower() for each in values)
            shown = f"its {field}" if isinstance(value, dict) else f"{field} {str(value).lower()}"
            raise refusal(tool, shown, why, where=f"plan.{field}", fix=f"set plan.{field} to {words}")


def refuse_settings(tool: str, train: TrainSection, *, states: Iterable[str] = ("fp32",)) -> None:
    """Raise when the recipe wants its moments or single modules in a precision that the tool cannot give them."""
    if train.optimizer.states not in (takes := tuple(states)):
        raise UserError("P063", f"{tool} cannot express moments in {train.optimizer.states} for this plan",
                        where="train.optimizer.states", fix=f"set it to {either(takes)}")  # fmt: skip
    if train.precision:
        raise UserError("P063", f"{tool} cannot express single modules in a precision of their own",
                        where="train.precision", fix="leave it out")  # fmt: skip


def refuse_cpu(tool: str, cluster: Cluster) -> None:
    """Raise when there are no GPUs."""
    if cluster.device.kind == "cpu":
        raise refusal(tool, f"a run on {cluster}", "what is written here starts it on GPUs", where="cluster",
                      fix="name a cluster of GPUs, such as 8xH100")  # fmt: skip


def refusal(tool: str, what: str, why: str, *, where: str, fix: str) -> UserError:
    """Return the error that says why the plan has no form in this tool."""
    return UserError("P061", f"{tool} cannot express {what}: {why}", where=where,
                     fix=f"{fix}, or emit for another tool")  # fmt: skip


def unknown_model(tool: str, what: str, why: str, *, where: str = "model") -> UserError:
    """Return the error that says why the tool has no such network."""
    return UserError("P062", f"{tool} has no network for {what}: {why}", where=where,
                     fix="emit for accelerate, deepspeed or hf-trainer, which take any model")  # fmt: skip


def torchrun(cluster: Cluster, *program: str) -> str:
    """Return the command that starts `program` on every device; with several nodes it runs on each of them."""
    start = ["torchrun", "--nproc-per-node", str(cluster.devices_per_node)]
    if cluster.num_nodes == 1:
        start.append("--standalone")
    else:
        start += ["--nnodes", str(cluster.num_nodes), "--node-rank", '"$NODE_RANK"']
        start += ["--master-addr", '"$MASTER_ADDR"', "--master-port", str(PORT)]
    return " ".join([*start, *program])


def whole_path(model: str) -> Path:
    """Return the model's folder as a path that means the same in the folder of the files."""
    path = Path(model).expanduser().absolute()
    return path.parent if path.name == "config.json" else path


def as_json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"


def headline(tool: str, plan: Plan, question: Question) -> str:
    """Return the comment that a written file begins with."""
    return f"# {question.recipe.name} on {question.cluster}, for {tool}: {plan}\n"

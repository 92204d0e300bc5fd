"""The result of an emitter, its errors, launch commands, and an adapter as PEFT's LoraConfig."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trimaran.core import Plan, TrainSection, UserError, expand_user
from trimaran.machine import Cluster
from trimaran.planner.question import Question
from trimaran.planner.rules.axis_rules import either

PORT = 29500  # torchrun's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """A tool's configuration for a plan: files by name, the launch command, and notes.

    With several nodes the command runs on each of them, with `NODE_RANK` and `MASTER_ADDR` set, unless a note says
    otherwise. `notes` say what the tool or the user's own script decides.
    """

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()


class Takes(NamedTuple):
    """The values of a plan field that a tool supports, and why it has no others."""

    values: tuple[object, ...]
    why: str


# Fields that no tool has in its configuration.
UNSUPPORTED_EVERYWHERE: Mapping[str, Takes] = {
    "towers": Takes(({},), "it treats all towers of a model alike"),
    "disk.path": Takes(("",), "it offloads to host memory, or to files of its own"),
    "fp8.recipe": Takes(("tensor",), "it has recipes of its own"),
    "comm.compression": Takes(("none",), "compressed gradients need a hook in the user's code"),
    "comm.local_steps": Takes((1,), "local steps need a training loop of the user's own"),
    "engine": Takes(("torch", "deepspeed"), "asynchronous training needs a parameter server"),
}


def refuse_unless(tool: str, plan: Plan, takes: Mapping[str, Takes]) -> None:
    """Raise for the first field of `plan` whose value the tool does not support."""
    for field, (values, why) in {**UNSUPPORTED_EVERYWHERE, **takes}.items():
        if (value := attrgetter(field)(plan)) not in values:
            values_text = either("{}" if each == {} else str(each).lower() for each in values)
            shown = f"its {field}" if isinstance(value, dict) else f"{field} {str(value).lower()}"
            raise refusal(tool, shown, why, where=f"plan.{field}", fix=f"set plan.{field} to {values_text}")


def refuse_settings(tool: str, train: TrainSection, *, states: Iterable[str] = ("fp32",)) -> None:
    """Raise when the tool does not support the precision of the moments, or precisions of single modules."""
    if train.optimizer.states not in (takes := tuple(states)):
        raise UserError(
            "P063.cannot-express-moments",
            where="train.optimizer.states",
            tool=tool,
            states=train.optimizer.states,
            takes=either(takes),
        )
    if train.precision:
        raise UserError("P063.cannot-express-single", where="train.precision", tool=tool)


def refuse_cpu(tool: str, cluster: Cluster) -> None:
    """Raise when there are no GPUs."""
    if cluster.device.traits.shares_cores:
        raise refusal(tool, f"a run on {cluster}", "the emitted command starts it on GPUs", where="cluster",
                      fix="name a cluster of GPUs, such as 8xH100")  # fmt: skip


def refusal(tool: str, what: str, why: str, *, where: str, fix: str) -> UserError:
    """Return the error for a plan that the tool cannot express."""
    return UserError("P061.cannot-express", where=where, tool=tool, text=what, why=why, way=fix)


def unknown_model(tool: str, what: str, why: str, *, where: str = "model") -> UserError:
    """Return the error for a model that the tool does not have."""
    return UserError("P062.no-model", where=where, tool=tool, text=what, why=why)


def torchrun(cluster: Cluster, *program: str) -> str:
    """Return the command that starts `program` on every device; with several nodes, for each of them."""
    start = ["torchrun", "--nproc-per-node", str(cluster.devices_per_node)]
    if cluster.num_nodes == 1:
        start.append("--standalone")
    else:
        start += ["--nnodes", str(cluster.num_nodes), "--node-rank", '"$NODE_RANK"']
        start += ["--master-addr", '"$MASTER_ADDR"', "--master-port", str(PORT)]
    return " ".join([*start, *program])


def absolute_path(model: str) -> Path:
    """Return the model's folder as an absolute path."""
    path = expand_user(model).absolute()
    return path.parent if path.name == "config.json" else path


def as_json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"


def headline(tool: str, plan: Plan, question: Question) -> str:
    """Return the first comment of an emitted file."""
    return f"# {question.recipe.name} on {question.cluster}, for {tool}: {plan}\n"


PEFT_FILE = "peft_config.json"


def refuse_adapter(tool: str, question: Question) -> None:
    """Raise if an adapter should be trained: the tool would silently train the whole model."""
    if question.recipe.model.adapter:
        raise refusal(tool, "an adapter", "it trains whole models", where="model.adapter",
                      fix="remove model.adapter")  # fmt: skip


def peft_files(tool: str, question: Question) -> dict[str, str]:
    """Return the file with the arguments of peft's LoraConfig; none without an adapter."""
    if (adapter := question.recipe.model.adapter) is None:
        return {}
    names = () if adapter.targets == "all-linear" else adapter.targets
    for field, holds, why, fix in (
        ("base", adapter.base != "auto", "the emitted files load 16-bit weights", "set it to auto"),
        ("path", adapter.path is not None, "the emitted files start a new one", "leave it out"),
        ("towers", bool(adapter.towers), "peft's targets do not know towers", "leave it out"),
        ("targets", any("*" in name for name in names), "peft's lists have no star", "name the linear layers"),
        ("train", any("*" in name for name in adapter.train), "peft's lists have no star", "name the modules"),
    ):
        if holds:
            raise refusal(tool, f"this {field} of an adapter", why, where=f"model.adapter.{field}", fix=fix)
    fields: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.kind == "dora",
        "target_modules": adapter.targets if adapter.targets == "all-linear" else list(adapter.targets),
    }
    config = fields | ({"modules_to_save": list(adapter.train)} if adapter.train else {})
    return {PEFT_FILE: as_json(config)}


def peft_notes(question: Question) -> list[str]:
    """Return what a user's own script must do for an adapter."""
    if question.recipe.model.adapter is None:
        return []
    return [f"your script loads the model in the compute precision and trains get_peft_model(model, "
            f"LoraConfig(**json.load(open('{PEFT_FILE}')))); without that it would train the whole model"]  # fmt: skip

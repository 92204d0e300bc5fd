"""DeepSpeed's JSON: ZeRO 0 to 3 and its offload, from the same function that our own engine is configured by."""

from typing import Any

from trimaran.core import Plan, TrainSection, UserError
from trimaran.core.deepspeed_config import check_deepspeed, deepspeed_config
from trimaran.planner.emit.emission import (
    PORT,
    Emission,
    Takes,
    as_json,
    refusal,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
)
from trimaran.planner.question import Question

TOOL = "deepspeed"
FILE, HOSTS = "ds_config.json", "hostfile"
TAKES = {"recompute": Takes(("none", "full"), "the model computes all its blocks again, or none")}
HINTS = {"engine": "deepspeed", "compile": False}  # whatever is said about these, DeepSpeed runs the plan


def emit_deepspeed(plan: Plan, question: Question) -> Emission:
    """Return DeepSpeed's JSON for a script that hands it to `deepspeed.initialize`."""
    cluster, train = question.cluster, question.recipe.train
    refuse_cpu(TOOL, cluster)
    refuse_settings(TOOL, train)
    refuse_for_deepspeed(TOOL, plan, train)
    files, words = {FILE: as_json(whole_config(plan, question))}, ["deepspeed"]
    said = ["train.py is your script; the learning rate's schedule and the data are there"]
    if cluster.num_nodes > 1:
        hosts = [f"node-{rank} slots={cluster.devices_per_node}\n" for rank in range(cluster.num_nodes)]
        files[HOSTS] = "".join(hosts)
        words += ["--hostfile", HOSTS, "--num_nodes", str(cluster.num_nodes), "--master_port", str(PORT)]
        said.append(f"put the names of your machines in {HOSTS}; the command runs once, on one that reaches all others")
    words += ["--num_gpus", str(cluster.devices_per_node), "train.py", "--deepspeed", "--deepspeed_config", FILE]
    if plan.recompute == "full":
        words.append("--gradient_checkpointing")
        said.append("--gradient_checkpointing asks your script for model.gradient_checkpointing_enable()")
    if plan.compile:
        said.append("blocks are compiled when your script calls engine.compile()")
    return Emission(files=files, command=" ".join(words), notes=tuple(said))


def refuse_for_deepspeed(tool: str, plan: Plan, train: TrainSection) -> None:
    """Raise for what DeepSpeed does not do, in the words of an emitter."""
    refuse_unless(tool, plan, TAKES)
    try:
        check_deepspeed(plan.model_copy(update=HINTS), train)
    except UserError as error:
        what = error.what.partition(": ")[2]
        raise refusal(tool, what, "of DeepSpeed it has ZeRO over all ranks, and its offload", where=error.where,
                      fix=f"change {error.where}") from error  # fmt: skip


def whole_config(plan: Plan, question: Question) -> dict[str, Any]:
    """Return DeepSpeed's configuration with its optimizer."""
    pinned = question.cluster.device.kind == "cuda"
    return deepspeed_config(plan.model_copy(update=HINTS), question.recipe.train, pin_memory=pinned)


def client_config(plan: Plan, question: Question) -> dict[str, Any]:
    """Return the configuration for a script that brings its own optimizer, on the host too."""
    config = whole_config(plan, question)
    del config["optimizer"]
    return config | ({"zero_force_ds_cpu_optimizer": False} if plan.offload != "none" else {})

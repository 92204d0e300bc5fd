"""DeepSpeed's JSON: ZeRO 0 to 3 and offload, from the same function that configures our own engine."""

from typing import Any

from trimaran.core import Plan, TrainSection, UserError, check_deepspeed, deepspeed_config
from trimaran.planner.emit.emission import (
    PORT,
    Emission,
    Takes,
    as_json,
    peft_files,
    peft_notes,
    refusal,
    refuse_cpu,
    refuse_settings,
    refuse_unless,
)
from trimaran.planner.question import Question

TOOL = "deepspeed"
FILE, HOSTS = "ds_config.json", "hostfile"
TAKES = {"recompute": Takes(("none", "full"), "the model recomputes all its blocks or none")}
IGNORED_FIELDS = {"engine": "deepspeed", "compile": False}  # DeepSpeed runs the plan whatever these say


def emit_deepspeed(plan: Plan, question: Question) -> Emission:
    """Return DeepSpeed's JSON for a script that passes it to `deepspeed.initialize`."""
    cluster, train = question.cluster, question.recipe.train
    refuse_cpu(TOOL, cluster)
    refuse_settings(TOOL, train)
    refuse_for_deepspeed(TOOL, plan, train)
    files, command = {FILE: as_json(full_config(plan, question))} | peft_files(TOOL, question), ["deepspeed"]
    notes = ["train.py is your script; it defines the learning-rate schedule and the data", *peft_notes(question)]
    if cluster.num_nodes > 1:
        hosts = [f"node-{rank} slots={cluster.devices_per_node}\n" for rank in range(cluster.num_nodes)]
        files[HOSTS] = "".join(hosts)
        command += ["--hostfile", HOSTS, "--num_nodes", str(cluster.num_nodes), "--master_port", str(PORT)]
        notes.append(f"put your host names in {HOSTS}; run the command once, on a machine that reaches all others")
    command += ["--num_gpus", str(cluster.devices_per_node), "train.py", "--deepspeed", "--deepspeed_config", FILE]
    if plan.recompute == "full":
        command.append("--gradient_checkpointing")
        notes.append("--gradient_checkpointing asks your script for model.gradient_checkpointing_enable()")
    if plan.compile:
        notes.append("blocks are compiled when your script calls engine.compile()")
    return Emission(files=files, command=" ".join(command), notes=tuple(notes))


def refuse_for_deepspeed(tool: str, plan: Plan, train: TrainSection) -> None:
    """Raise an emitter's error for what DeepSpeed does not do."""
    refuse_unless(tool, plan, TAKES)
    try:
        check_deepspeed(plan.model_copy(update=IGNORED_FIELDS), train)
    except UserError as error:
        what = error.what.partition(": ")[2]
        raise refusal(tool, what, "only ZeRO over all ranks and its offload are supported", where=error.where,
                      fix=f"change {error.where}") from error  # fmt: skip


def full_config(plan: Plan, question: Question) -> dict[str, Any]:
    """Return DeepSpeed's configuration with its optimizer."""
    pinned = question.cluster.device.traits.has_own_memory
    return deepspeed_config(plan.model_copy(update=IGNORED_FIELDS), question.recipe.train, pin_memory=pinned)

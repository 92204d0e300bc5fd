"""The arguments of the Hugging Face Trainer, and a short script that trains with them. For transformers 5."""

import shlex
from typing import Any

from trimaran.core import Plan, Recipe
from trimaran.models import OutlineLayer
from trimaran.planner.emit.accelerate import fsdp_notes, parallelism, refuse_for_torch, reshards
from trimaran.planner.emit.deepspeed import full_config, refuse_for_deepspeed
from trimaran.planner.emit.emission import (
    PEFT_FILE,
    Emission,
    Takes,
    absolute_path,
    as_json,
    peft_files,
    refuse_settings,
    refuse_unless,
    torchrun,
)
from trimaran.planner.question import Question

TOOL = "hf-trainer"
FILE, SCRIPT, DEEPSPEED_FILE = "training_args.json", "train.py", "ds_config.json"
TAKES = {
    "mesh.tp": Takes((1,), "tp is set when the model is loaded, not by its arguments"),
    "precision": Takes(("fp32", "bf16", "fp16"), "its arguments have no fp8"),
}
ON_CPU = {  # accelerate would silently ignore these
    "sharding": Takes(("none",), "on a CPU it only has replicas"),
    "precision": Takes(("fp32", "bf16"), "on a CPU it has no other"),
    "engine": Takes(("torch",), "DeepSpeed needs GPUs here, and there is no other engine"),
}
TEXT = '''"""Trains `MODEL` on the text in `DATA` with the arguments in {file}."""

import json
import os
import sys
from itertools import chain

from accelerate import ParallelismConfig
from datasets import load_dataset
{imports}from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

SEQ_LEN = {seq_len}


def arguments(path: str) -> TrainingArguments:
    with open(path) as file:
        fields = json.load(file)
    if sizes := fields.pop("parallelism_config", None):
        fields["parallelism_config"] = ParallelismConfig(**sizes)
    return TrainingArguments(**fields)


def chunks(tokenizer):
    def split(rows):
        tokens = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        starts = range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)
        return {{"input_ids": [tokens[start : start + SEQ_LEN] for start in starts]}}

    text = load_dataset("text", data_files=os.environ["DATA"], split="train")
    return text.map(split, batched=True, remove_columns=text.column_names)


def main() -> None:
    args = arguments(sys.argv[1])  # before the model: with ZeRO-3 it is built in shards
    name = os.environ["MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="{attention}", dtype="{dtype}")
{wrap}    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, args, data_collator=collate, train_dataset=chunks(tokenizer)).train()


if __name__ == "__main__":
    main()
'''
PEFT_IMPORT = "from peft import LoraConfig, get_peft_model\n"
PEFT_WRAP = f'''    with open("{PEFT_FILE}") as file:
        model = get_peft_model(model, LoraConfig(**json.load(file)))
'''
OPTIMIZERS = {"fp32": "adamw_torch_fused", "8bit": "adamw_torch_8bit"}  # AdamW; the 8-bit one is torchao's
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def emit_hf_trainer(plan: Plan, question: Question) -> Emission:
    """Return the Trainer's arguments as JSON, a script that reads them, and the torchrun command."""
    recipe, cluster = question.recipe, question.cluster
    files = {FILE: "", SCRIPT: "", **peft_files(TOOL, question)}
    fields = common(plan, recipe)
    on_cpu = cluster.device.traits.shares_cores
    refuse_unless(TOOL, plan, TAKES | (ON_CPU if on_cpu else {}))
    if plan.engine == "deepspeed":
        refuse_settings(TOOL, recipe.train)
        refuse_for_deepspeed(TOOL, plan, recipe.train)
        files[DEEPSPEED_FILE] = as_json(full_config(plan, question))
        fields |= {"deepspeed": DEEPSPEED_FILE, "optim": "adamw_torch_fused"}
    else:
        refuse_settings(TOOL, recipe.train, states=("fp32", "8bit"))
        refuse_for_torch(TOOL, plan)
        fields |= sharded(plan) | {"optim": OPTIMIZERS[recipe.train.optimizer.states]}
    if on_cpu:
        fields |= {"use_cpu": True}
    if plan.recompute == "full" and "fsdp" not in fields:
        fields |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    files |= {FILE: as_json(fields), SCRIPT: script(plan, question)}
    model = shlex.quote(str(absolute_path(recipe.model.path))) if recipe.model.path else "..."
    command = f"MODEL={model} DATA=... {torchrun(cluster, SCRIPT, FILE)}"
    notes = ["MODEL is a local folder or a name on the Hub, DATA a text file"]
    if plan.engine_traits.uses_fsdp:
        notes += fsdp_notes(plan)
    if plan.compile:
        is_compiled = plan.engine_traits.compiles
        text = "is compiled as a whole, not block by block" if is_compiled else "is not compiled by DeepSpeed"
        notes.append(f"the model {text}")
    return Emission(files=files, command=command, notes=tuple(notes))


def script(plan: Plan, question: Question) -> str:
    """Return the script. Trained weights are fp32; those below an adapter are frozen, in the compute precision."""
    has_adapter = question.recipe.model.adapter is not None
    runs = question.outline.main.runs if question.outline else ()
    operators = (block.operators for block, _ in runs if isinstance(block, OutlineLayer))
    only_eager = any(each is not None and each.keeps_scores for each in operators)
    return TEXT.format(
        file=FILE,
        seq_len=question.recipe.data.seq_len,
        imports=PEFT_IMPORT * has_adapter,
        wrap=PEFT_WRAP * has_adapter,
        dtype=DTYPES[plan.precision] if has_adapter else "float32",
        attention="eager" if only_eager else "sdpa",
    )


def common(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of every plan. The loss is divided by the tokens of the global batch."""
    train, constants, wanted = recipe.train, recipe.train.optimizer, recipe.train.schedule
    kind, extra = "constant_with_warmup", {}
    if wanted.kind == "cosine":
        kind, extra = "cosine_with_min_lr", {"min_lr_rate": wanted.floor}
    elif wanted.kind == "linear":
        kind, extra = "polynomial", {"lr_end": train.lr * wanted.floor, "power": 1.0}
    elif wanted.kind == "wsd":
        decay_steps = wanted.decay_steps or max(1, train.steps // 5)
        kind = "warmup_stable_decay"
        extra = {"num_decay_steps": decay_steps, "decay_type": "linear", "min_lr_ratio": wanted.floor}
    return {
        "output_dir": recipe.name,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "average_tokens_across_devices": True,
        "max_steps": train.steps,
        "learning_rate": train.lr,
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": extra,
        "warmup_steps": wanted.warmup_steps,
        "weight_decay": constants.weight_decay,
        "adam_beta1": constants.beta1,
        "adam_beta2": constants.beta2,
        "adam_epsilon": constants.eps,
        "max_grad_norm": train.clip_norm,
        "seed": train.seed % 2**32,  # numpy takes no more
        "full_determinism": train.deterministic,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "torch_compile": plan.compile and plan.engine_traits.compiles,
        "dataloader_drop_last": True,
        # `auto` starts with none, and the Trainer does not add workers later.
        "dataloader_num_workers": 0 if recipe.data.workers == "auto" else recipe.data.workers,
    }


def sharded(plan: Plan) -> dict[str, Any]:
    """Return the arguments of FSDP2, or of DDP."""
    if plan.sharding == "none":
        return {"ddp_bucket_cap_mb": plan.comm.bucket_mb}
    fields: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": reshards(plan),
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_offload": plan.offload == "parameters",
            "activation_checkpointing": plan.recompute == "full",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        # Otherwise gradients would stay unsharded until the last micro-batch.
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    if sizes := parallelism(plan):
        fields["parallelism_config"] = sizes
    return fields

"""Names that other training programs use for fields of a recipe."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from trimaran.core.errors import closest
from trimaran.core.recipe import Recipe

# The names of transformers and TRL, axolotl, LLaMA-Factory, torchtitan, Megatron-LM, nanoGPT and PEFT.
FIELD_ALIASES = {
    "train.lr": "learning_rate max_lr peak_lr base_lr lr_max",
    "train.steps": "max_steps num_steps train_steps total_steps training_steps num_training_steps train_iters "
    "max_iters num_iterations iterations",
    "train.global_batch": "batch_size train_batch_size global_batch_size total_batch_size effective_batch_size batch",
    "train.clip_norm": "max_grad_norm grad_clip gradient_clipping gradient_clip_val max_norm clip_grad",
    "train.seed": "random_seed data_seed",
    "train.schedule.kind": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "train.schedule.warmup_steps": "num_warmup_steps warmup_ratio warmup warmup_iters lr_warmup_iters",
    "train.schedule.floor": "min_lr lr_min min_lr_ratio",
    "train.optimizer.weight_decay": "decay wd",
    "train.optimizer.beta1": "adam_beta1",
    "train.optimizer.beta2": "adam_beta2",
    "train.optimizer.eps": "adam_epsilon adam_eps epsilon",
    "train.evaluate.every": "eval_steps eval_interval eval_every evals_per_epoch",
    "train.evaluate.batches": "eval_iters eval_batches",
    "data.epochs": "num_epochs num_train_epochs n_epochs max_epochs",
    "data.seq_len": "max_seq_length max_seq_len sequence_len sequence_length seq_length max_length block_size "
    "context_length cutoff_len max_position_embeddings",
    "data.path": "dataset dataset_name dataset_path data_files train_file data_path datasets",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_config tokenizer_name_or_path",
    "data.text_field": "dataset_text_field text_column",
    "data.holdout": "val_set_size val_size validation_split eval_split test_size",
    "data.workers": "num_workers dataloader_num_workers",
    "data.samples.batching": "packing sample_packing group_by_length",
    "data.samples.template": "chat_template prompt_template",
    "model.path": "model_name model_name_or_path base_model pretrained_model_name_or_path hf_model model_path",
    "model.adapter.rank": "lora_r lora_rank r",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.targets": "lora_target_modules target_modules lora_target lora_target_linear",
    "model.adapter.train": "modules_to_save lora_modules_to_save",
    "model.adapter.rank_stabilised": "use_rslora peft_use_rslora rank_stabilized",
    "model.adapter.kind": "use_dora peft_use_dora adapter_type finetuning_type peft_type",
    "model.adapter.base": "load_in_4bit quantization quantization_bit",
    "model.adapter": "lora peft peft_config lora_config",
    "plan.micro_batch": "micro_batch_size per_device_train_batch_size local_batch_size mbs",
    "plan.grad_accum": "gradient_accumulation_steps grad_accumulation_steps accumulation_steps "
    "gradient_accumulation accumulate_grad_batches",
    "plan.precision": "bf16 fp16 dtype torch_dtype mixed_precision amp",
    "plan.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint",
    "plan.compile": "torch_compile",
    "plan.mesh.tp": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "plan.mesh.pp": "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "plan.mesh.cp": "context_parallel_size context_parallel_degree cp_size",
    "plan.mesh.ep": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "plan.mesh.dp_shard": "data_parallel_shard_degree fsdp",
    "checkpoint.every": "save_steps save_interval save_freq checkpoint_interval checkpoint_every checkpointing_steps",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "telemetry.details_every": "logging_steps log_freq log_interval",
    "telemetry.wandb.project": "wandb_project",
    "telemetry.wandb.mode": "report_to",
    "telemetry.mlflow.uri": "mlflow_tracking_uri tracking_uri",
    "telemetry.mlflow.experiment": "mlflow_experiment_name",
    "name": "run_name experiment_name job_name",
    "cluster": "gpus devices num_gpus nproc_per_node accelerator",
}


def field_for(name: str, section: str = "") -> str:
    """Return the dotted field that a person meant by `name` in `section`; empty if there is no good guess.

    In this order: the name of another program for a field of the section, a small typo in one of these, the name of
    another program, a field of that exact name in another section, a larger typo.
    """
    plain = name.replace("-", "_").casefold()
    prefix = f"{section}." if section else ""
    siblings = [each.removeprefix(prefix) for each in all_fields() if each.rpartition(".")[0] == section]
    same = sorted((each for each in all_fields() if each.rpartition(".")[2] == plain), key=lambda each: each.count("."))
    small_typo, typo = (closest(plain, siblings, cutoff=cutoff) for cutoff in (0.8, 0.6))
    known = _by_alias().get(plain) or next(iter(same), "")
    if small_typo and known.rpartition(".")[0] != section:
        return f"{prefix}{small_typo}"
    return known or (f"{prefix}{typo}" if typo else "")


@cache
def all_fields() -> tuple[str, ...]:
    """Every field and section of a recipe, by dotted name."""
    return tuple(_fields(Recipe, ""))


@cache
def _by_alias() -> dict[str, str]:
    return {alias: field for field, aliases in FIELD_ALIASES.items() for alias in aliases.split()}


def _fields(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not field.exclude:
            yield f"{prefix}{name}"
            if section := section_model(field.annotation):
                yield from _fields(section, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section, also if it may be `auto` or null; None for any other field."""
    options = [annotation, *get_args(annotation)]
    options += [inner for each in options[1:] for inner in get_args(each)]  # the forms of a tagged union
    return next((each for each in options if isinstance(each, type) and issubclass(each, BaseModel)), None)

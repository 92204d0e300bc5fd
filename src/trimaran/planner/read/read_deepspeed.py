"""Reads DeepSpeed's JSON, `ds_config.json`, as pins of a plan. Field names are those of DeepSpeed 0.19."""

from pathlib import Path

from trimaran.core import SHARDINGS
from trimaran.planner.read.read_config import FieldReader, ReadConfig, ReadField, load_tree

FIELDS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16",
                    "gradient_accumulation_steps", "zero_allow_untested_optimizer", "bfloat16"})  # fmt: skip
RECIPE, SPEED, SHOWS = "it is the recipe's, not the plan's", "it changes only the speed", "it changes no result"
NOT_HERE = "we have nothing like it"
REASONS = {
    "optimizer": "the recipe's train section has the optimizer", "scheduler": "the recipe's train section has it",
    "gradient_clipping": "it is the recipe's train.clip_norm", "seed": RECIPE,
    "zero_allow_untested_optimizer": SHOWS, "zero_force_ds_cpu_optimizer": SPEED, "steps_per_print": SHOWS,
    "wall_clock_breakdown": SHOWS, "dump_state": SHOWS, "tensorboard": SHOWS, "wandb": SHOWS, "csv_monitor": SHOWS,
    "comet": SHOWS, "flops_profiler": SHOWS, "comms_logger": SHOWS, "memory_breakdown": SHOWS, "aio": SPEED,
    "prescale_gradients": "gradients are reduced in fp32", "gradient_predivide_factor": "gradients are reduced in fp32",
    "sparse_gradients": NOT_HERE, "amp": "write fp16 or bf16", "autotuning": "the planner does that",
    "elasticity": "the recipe's faults.ranks", "curriculum_learning": NOT_HERE, "data_efficiency": NOT_HERE,
    "compression_training": NOT_HERE, "checkpoint": "the recipe's checkpoint section", "compile": "pin plan.compile",
    "dataloader_drop_last": RECIPE, "monitor_config": SHOWS, "gradient_accumulation_dtype": "it is fp32 here",
}  # fmt: skip
ZERO_REASONS = dict.fromkeys((
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "sub_group_size",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "round_robin_gradients", "use_multi_rank_bucket_allreduce", "memory_efficient_linear",
    "stage3_module_granularity_threshold", "stage3_use_all_gather_on_step", "ignore_unused_parameters",
), SPEED) | {
    "stage3_gather_16bit_weights_on_model_save": "a trained model is saved whole here",
    "stage3_gather_fp16_weights_on_model_save": "a trained model is saved whole here",
    "zero_hpz_partition_size": "shards are spread over all ranks here",
    "mics_shard_size": "shards are spread over all ranks here", "mics_hierarchical_params_gather": NOT_HERE,
    "zero_quantized_weights": NOT_HERE, "zero_quantized_gradients": NOT_HERE,
    "zero_quantized_nontrainable_weights": NOT_HERE, "load_from_fp32_weights": "weights are loaded in fp32 here",
}  # fmt: skip
SCALE = "the loss scale is dynamic here"


def read_deepspeed(path: Path) -> ReadConfig:
    """Return the pins in DeepSpeed's file."""
    reader = FieldReader(load_tree(path), str(path))
    read_into(reader)
    return ReadConfig(tool="deepspeed", fields=tuple(reader.fields))


def read_into(reader: FieldReader, *, precision: str = "") -> None:
    """Read all fields of DeepSpeed's configuration. `precision` is that of another file, which must be the same."""
    zero = reader.section("zero_optimization")
    stage = zero.take("stage", 0)
    if stage == "auto":
        zero.leave("stage", stage, "auto: the Trainer of transformers decides it")
    elif stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise zero.wrong("stage", f"{stage!r} is not a ZeRO stage")
    else:
        axis = "mesh__dp_replicate" if stage else "mesh__dp_shard"
        zero.pin("stage", stage, sharding=SHARDINGS[stage], **{axis: 1})
    _offload(zero, stage if isinstance(stage, int) else 3)
    if (elements := zero.count("reduce_bucket_size")) is not None:
        megabytes = min(4096, max(1, round(elements * 4 / 2**20)))
        zero.pin("reduce_bucket_size", elements, comm__bucket_mb=megabytes)
    if (gathered := zero.count("allgather_bucket_size")) is not None:
        zero.leave("allgather_bucket_size", gathered, "there is one size for both, plan.comm.bucket_mb")
    zero.leave_rest(ZERO_REASONS)
    reader.fields += zero.fields
    _precision(reader, precision)
    total, micro, steps = (reader.count(name) for name in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))  # fmt: skip
    if total and micro and total % (micro * (steps or 1)):
        raise reader.contradiction(
            f"train_batch_size {total} is not a multiple of train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps or 1}", "correct one of the three")  # fmt: skip
    if total:
        # Of the recipe, outside its plan.
        reader.fields.append(ReadField(name="train_batch_size", value=total, pins={"train.global_batch": total}))
    if micro:
        reader.pin("train_micro_batch_size_per_gpu", micro, micro_batch=micro)
    if steps:
        reader.pin("gradient_accumulation_steps", steps, grad_accum=steps)
    # The section configures DeepSpeed's activation checkpointing; it has no switch of its own.
    section = reader.section("activation_checkpointing")
    given = {name: section.take(name) for name in ("partition_activations", "cpu_checkpointing", "number_checkpoints")}
    if any(given.values()):
        section.pin("partition_activations, cpu_checkpointing or number_checkpoints", True, recompute="full")
        if given["cpu_checkpointing"]:
            section.leave("cpu_checkpointing", True, "pin plan.offload=activations if nothing else is offloaded")
    elif any(value is not None for value in given.values()):
        section.leave("partition_activations", False, "the section turns nothing on; pin plan.recompute=full if the "
                      "model recomputes its blocks")  # fmt: skip
    section.leave_rest({}, SPEED)
    reader.fields += section.fields
    # Tensor, pipeline and sequence parallelism.
    inner = []
    for section_name, name, axis in (("tensor_parallel", "autotp_size", "tp"), ("pipeline", "stages", "pp")):
        section = reader.section(section_name)
        if (degree := section.count(name)) and degree > 1:
            section.pin(name, degree, **{f"mesh__{axis}": degree})
            inner.append(degree)
        section.leave_rest({}, SPEED)
        reader.fields += section.fields
    if (degree := reader.count("sequence_parallel_size")) and degree > 1:
        reader.pin("sequence_parallel_size", degree, mesh__cp=degree, comm__context="exchange")
        inner.append(degree)
    if inner:
        reader.leave("the file", "DeepSpeed's", "our DeepSpeed engine splits no layers; the plan is for torch")
    else:
        reader.pin("the file", "DeepSpeed's", engine="deepspeed", mesh__tp=1, mesh__pp=1, mesh__cp=1)
    types = reader.section("data_types")
    for each, name in ((reader, "communication_data_type"), (types, "grad_accum_dtype")):
        if (value := each.take(name)) is not None:
            each.leave(name, value, "gradients are always summed and reduced in fp32")
    types.leave_rest({})
    reader.fields += types.fields
    reader.leave_rest(REASONS)


def _offload(zero: FieldReader, stage: int) -> None:
    devices = {}
    for name, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_params")):
        section = zero.section(name)
        devices[name] = section.take("device", "cpu" if zero.switch(old) else "none") or "none"
        section.leave_rest({}, SPEED)
        zero.fields += section.fields
        if devices[name] not in ("none", "cpu"):
            zero.leave(f"{name}.device", devices[name], "states are only offloaded to host memory here")
            devices[name] = "none"
    if devices["offload_param"] == "cpu" and stage != 3:
        raise zero.contradiction(f"offload_param needs ZeRO stage 3, but the stage is {stage}",
                                 "set zero_optimization.stage to 3, or leave out offload_param")  # fmt: skip
    if devices["offload_param"] == "cpu":
        zero.pin("offload_param.device", "cpu", offload="parameters")
        if devices["offload_optimizer"] != "cpu":
            zero.leave("offload_optimizer.device", "none", "offloaded parameters take their states along")
    else:
        offload = "optimizer" if devices["offload_optimizer"] == "cpu" else "none"
        zero.pin("offload_optimizer.device", devices["offload_optimizer"], offload=offload)


def _precision(reader: FieldReader, other: str) -> None:
    enabled, auto = {}, False
    for name in ("bf16", "bfloat16", "fp16"):
        section = reader.section(name)
        enabled[name] = section.switch("enabled", default=False)
        auto |= bool(section.fields)  # noted as left out
        section.leave_rest({}, SCALE if name == "fp16" else SPEED)
        reader.fields += section.fields
    bf16 = enabled["bf16"] or enabled["bfloat16"]
    if bf16 and enabled["fp16"]:
        raise reader.contradiction("both bf16 and fp16 are enabled", "enable one of them")
    name = "bf16" if bf16 else "fp16" if enabled["fp16"] else "" if auto else "fp32"
    if other and name and name != other:
        raise reader.contradiction(f"this file is for {name}, but accelerate's mixed_precision is for {other}",
                                   "correct one of them")  # fmt: skip
    if name == "fp32":
        reader.pin("bf16 and fp16", "not enabled", precision="fp32")
    elif name:
        reader.pin(f"{name}.enabled", True, precision=name)

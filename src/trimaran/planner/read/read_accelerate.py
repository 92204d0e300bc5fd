"""Reads accelerate's YAML as pins of a plan. Field names are those of accelerate 1.15, and older ones of FSDP."""

from pathlib import Path

from trimaran.core import SHARDINGS, UserError
from trimaran.planner.emit.accelerate import MIXED_PRECISION
from trimaran.planner.read.read_config import FieldReader, ReadConfig, load_tree
from trimaran.planner.read.read_deepspeed import FIELDS as DEEPSPEED_FIELDS
from trimaran.planner.read.read_deepspeed import SPEED, read_deepspeed
from trimaran.planner.read.read_deepspeed import read_into as read_deepspeed_into

FIELDS = frozenset({"distributed_type", "compute_environment", "num_processes", "mixed_precision"})
PRECISION = {name: precision for precision, name in MIXED_PRECISION.items()}
DEEPSPEED_FILE = "deepspeed_config_file"
SCRIPT, LAUNCHER = "it is about your script", "it says where the processes run, not how"
REASONS = dict.fromkeys((
    "compute_environment", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "gpu_ids", "deepspeed_hostfile", "enable_cpu_affinity", "mpirun_config", "tpu_env", "tpu_use_cluster", "use_cpu",
    "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "commands", "command_file", "ipex_config",
), LAUNCHER) | {"main_training_function": SCRIPT, "debug": SCRIPT, "downcast_bf16": "it is for TPUs"}  # fmt: skip
FSDP_REASONS = {
    "fsdp_auto_wrap_policy": "every block is a unit here", "fsdp_min_num_params": "every block is a unit here",
    "fsdp_transformer_layer_cls_to_wrap": "every block is a unit here", "fsdp_backward_prefetch": SPEED,
    "fsdp_forward_prefetch": SPEED, "fsdp_state_dict_type": "checkpoints are sharded here",
    "fsdp_use_orig_params": "FSDP2 always does", "fsdp_sync_module_states": "all ranks load the same weights",
    "fsdp_cpu_ram_efficient_loading": "weights are loaded by shards", "fsdp_version": "plans are for FSDP2",
}  # fmt: skip
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
SHARDING_OF = {"FULL_SHARD": "parameters", "HYBRID_SHARD": "parameters", "SHARD_GRAD_OP": "gradients",
               "HYBRID_SHARD_ZERO2": "gradients", "NO_SHARD": "none"}  # fmt: skip
AXES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp", "cp_size": "cp"}


def read_accelerate(path: Path) -> ReadConfig:
    """Return the pins in accelerate's file, and in the DeepSpeed file that it names."""
    reader = FieldReader(load_tree(path), str(path))
    num_nodes, value = reader.count("num_machines") or 1, reader.take("num_processes", -1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise reader.wrong("num_processes", f"{value!r} is not a number")
    num_devices = max(0, value)
    if num_devices % num_nodes:
        raise reader.contradiction(f"{num_devices} processes do not fill {num_nodes} equal machines",
                                   "correct num_processes or num_machines")  # fmt: skip
    kind = str(reader.take("distributed_type", "NO"))
    sections = {name: reader.section(name) for name in (
        "fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "dynamo_config")}  # fmt: skip
    precision = _precision(reader, of_file=kind == "DEEPSPEED" and sections["deepspeed_config"].has(DEEPSPEED_FILE))
    axes, has_axes = sections["parallelism_config"], False
    for name, axis in AXES.items():
        if (degree := axes.count(f"parallelism_config_{name}")) is not None:
            axes.pin(f"parallelism_config_{name}", degree, **{f"mesh__{axis}": degree})
            has_axes = True
    if (degree := axes.count("parallelism_config_sp_size")) and degree > 1:
        axes.pin("parallelism_config_sp_size", degree, mesh__cp=degree, comm__context="exchange")
        has_axes = True
    gathered = "keys are gathered here, which changes only the speed"
    axes.leave_rest({"parallelism_config_cp_comm_strategy": gathered}, SPEED)
    if has_axes:
        reader.pin("distributed_type", kind, mesh__pp=1)
    match kind:
        case "DEEPSPEED":
            _deepspeed(sections["deepspeed_config"], path, precision)
        case "FSDP":
            _fsdp(reader, sections["fsdp_config"], num_nodes, num_devices, has_axes=has_axes)
        case "MEGATRON_LM":
            _megatron(sections["megatron_lm_config"])
        case "NO" | "MULTI_GPU" | "MULTI_CPU" | "MULTI_NPU" | "MULTI_XPU" | "MULTI_MLU" | "MULTI_HPU":
            pins = {} if has_axes else {"mesh__dp_shard": 1, "mesh__tp": 1, "mesh__pp": 1, "mesh__cp": 1}
            reader.pin("distributed_type", kind, sharding="none", offload="none", **pins)
        case _:
            reader.leave("distributed_type", kind, "we have no such kind")
    if (backend := sections["dynamo_config"].take("dynamo_backend")) is not None:
        sections["dynamo_config"].pin("dynamo_backend", backend, compile=str(backend).upper() != "NO")
    for name, section in sections.items():
        section.leave_rest({}, f"it is not used with distributed_type {kind}" if name != "dynamo_config" else SPEED)
        reader.fields += section.fields
    reader.leave_rest(REASONS)
    return ReadConfig(tool="accelerate", fields=tuple(reader.fields), num_devices=num_devices)


def _precision(reader: FieldReader, *, of_file: bool) -> str:
    """Read mixed_precision and return it in our terms; empty if it is missing and a file of DeepSpeed's has it."""
    if of_file and not reader.has("mixed_precision"):
        return ""
    value = reader.take("mixed_precision", "no")
    name = "no" if value is False else str(value)  # YAML reads a bare `no` as false
    if name not in PRECISION:
        raise reader.wrong("mixed_precision", f"'{name}' is none of {', '.join(PRECISION)}")
    reader.pin("mixed_precision", name, precision=PRECISION[name])
    fp8 = reader.section("fp8_config")
    fp8.leave_rest({}, "fp8 has torchao's recipe here: one scale per tensor, new in every step")
    reader.fields += fp8.fields
    return PRECISION[name]


def _fsdp(reader: FieldReader, section: FieldReader, num_nodes: int, num_devices: int, *, has_axes: bool) -> None:
    """Read FSDP's section. Both versions are read; hybrid strategies shard inside each machine."""
    # FSDP2 has a boolean instead, and accelerate takes names and numbers for both versions.
    given = {name: section.take(name) for name in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy")}
    names = set()
    for value in given.values():
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            names.add("FULL_SHARD" if str(value).lower() == "true" else "SHARD_GRAD_OP")
        elif value is not None:
            number = int(value) if str(value).isdigit() else 0
            names.add(STRATEGIES[number - 1] if 0 < number <= len(STRATEGIES) else str(value))
    if len(names) > 1:
        both = " and ".join(sorted(names))
        raise section.contradiction(f"fsdp_reshard_after_forward and fsdp_sharding_strategy say {both}", "keep one")
    found = [name for name, value in given.items() if value is not None]
    name, strategy = (found or [*given])[0], names.pop() if names else "FULL_SHARD"
    if strategy not in SHARDING_OF:
        raise section.wrong(name, f"{strategy!r} is none of {', '.join(STRATEGIES)}")
    section.pin(name, strategy, sharding=SHARDING_OF[strategy])
    offloads, recomputes = section.switch("fsdp_offload_params"), section.switch("fsdp_activation_checkpointing")
    activations = section.switch("fsdp_activation_checkpointing_offload")
    if offloads and activations:
        section.leave("fsdp_activation_checkpointing_offload", True, "only one kind of state is offloaded in a plan")
    offload = "parameters" if offloads else "activations" if activations else "none"
    section.pin("fsdp_offload_params", bool(offloads), offload=offload)
    if recomputes is not None:
        section.pin("fsdp_activation_checkpointing", recomputes, recompute="full" if recomputes else "none")
    section.leave_rest(FSDP_REASONS)
    if has_axes:
        return
    is_hybrid = strategy.startswith("HYBRID")
    if is_hybrid and not num_devices:
        reader.leave("num_processes", num_devices, "hybrid shards need it: pin plan.mesh.dp_shard")
        return
    axes = {"dp_replicate": num_nodes, "dp_shard": num_devices // num_nodes} if is_hybrid else {"dp_replicate": 1}
    axes = {"dp_shard": 1} if strategy == "NO_SHARD" else axes
    pins = {f"mesh__{axis}": degree for axis, degree in {**axes, "tp": 1, "pp": 1, "cp": 1}.items()}
    reader.pin("distributed_type", "FSDP", **pins)


def _deepspeed(section: FieldReader, path: Path, precision: str) -> None:
    reasons = dict.fromkeys(("zero3_init_flag", "zero3_save_16bit_model"), "weights are loaded and saved by shards")
    reasons |= {"deepspeed_multinode_launcher": LAUNCHER, "gradient_clipping": "it is the recipe's train.clip_norm"}
    if (file := section.take(DEEPSPEED_FILE)) is not None:
        other = path.parent / str(file)
        reader = FieldReader(load_tree(other), str(other))
        read_deepspeed_into(reader, precision=precision)
        section.fields += reader.fields
    else:
        stage = section.take("zero_stage", 2)
        if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
            raise section.wrong("zero_stage", f"{stage!r} is not a ZeRO stage")
        axis = {"mesh__dp_replicate" if stage else "mesh__dp_shard": 1}
        section.pin("zero_stage", stage, sharding=SHARDINGS[stage], engine="deepspeed", mesh__tp=1, mesh__pp=1,
                    mesh__cp=1, **axis)  # fmt: skip
        devices = [section.take(f"offload_{what}_device") for what in ("param", "optimizer")]
        offload = "parameters" if devices[0] == "cpu" else "optimizer" if devices[1] == "cpu" else "none"
        section.pin("offload_param_device, offload_optimizer_device", devices, offload=offload)
        if "nvme" in devices:
            section.leave("offload device", "nvme", "states are only offloaded to host memory here")
        if (steps := section.count("gradient_accumulation_steps")) is not None:
            section.pin("gradient_accumulation_steps", steps, grad_accum=steps)
    section.leave_rest(reasons, LAUNCHER)


def _megatron(section: FieldReader) -> None:
    degrees = {axis: section.count(f"megatron_lm_{axis}_degree") or 1 for axis in ("tp", "pp")}
    section.pin("megatron_lm_tp_degree, megatron_lm_pp_degree", degrees, mesh__tp=degrees["tp"], mesh__pp=degrees["pp"],
                mesh__cp=1)  # fmt: skip
    if (micro_batches := section.count("megatron_lm_num_micro_batches")) is not None:
        section.pin("megatron_lm_num_micro_batches", micro_batches, grad_accum=micro_batches)
    recomputes = section.switch("megatron_lm_recompute_activations", default=False)
    section.pin("megatron_lm_recompute_activations", recomputes, recompute="selective" if recomputes else "none")
    shards = section.switch("megatron_lm_use_distributed_optimizer", default=False)
    section.pin("megatron_lm_use_distributed_optimizer", shards, sharding="optimizer" if shards else "none",
                offload="none")  # fmt: skip
    section.leave_rest({"megatron_lm_gradient_clipping": "it is the recipe's train.clip_norm",
                        "megatron_lm_sequence_parallelism": "tp always splits sequences here"})  # fmt: skip


def read_pins(path: Path) -> ReadConfig:
    """Return the pins in a tool's configuration. Raises UserError if it is neither tool's, or contradicts itself."""
    names = load_tree(path).keys()
    if names & {"distributed_type", "compute_environment"}:
        return read_accelerate(path)
    if names & DEEPSPEED_FIELDS:
        return read_deepspeed(path)
    if names & FIELDS:
        return read_accelerate(path)
    raise UserError("P070.neither-accelerate-configuration", where=str(path))

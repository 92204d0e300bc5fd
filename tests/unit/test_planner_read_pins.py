"""Files of accelerate and DeepSpeed as pins of a plan: what the emitters write is read back, and what people write."""

import json
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.emitted import expected
from tests.unit.test_planner_emit_plans import plan_and_question
from trimaran.app import main
from trimaran.core import Plan, UserError
from trimaran.planner import Question, ReadConfig, read_pins
from trimaran.planner.emit import emit

# The example of accelerate's guide to FSDP, version 1 of which has strategies with names and numbers.
FSDP1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
use_cpu: false
"""
# DeepSpeed through accelerate without a file of its own, from accelerate's guide.
INLINE_ZERO = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: fp16
num_machines: 1
num_processes: 2
"""
# ZeRO 3 of the Trainer's guide: most values are decided by the Trainer.
ZERO3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "made_up": 1,
}


def read(folder: Path, text: object, name: str = "file.yaml") -> ReadConfig:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return read_pins(path)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def left_out(found: ReadConfig) -> dict[str, str]:
    return {each.name: each.why for each in found.left_out}


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed"])
def test_what_an_emitter_writes_is_read_back_as_the_plan(tool: str, tmp_path: Path) -> None:
    num_read = 0

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=plan_and_question(tool))
    def check(case: tuple[Plan, Question]) -> None:
        nonlocal num_read
        plan, question = case
        try:
            emission = emit(tool, plan, question)
        except UserError:
            return
        for name, text in emission.files.items():
            (tmp_path / name).write_text(text)
        found = read_pins(tmp_path / ("accelerate.yaml" if tool == "accelerate" else "ds_config.json"))
        same = plan.model_copy(update={"sharding": expected(plan)["sharding"]})
        if tool == "deepspeed":
            same = same.model_copy(update={"engine": "deepspeed"})
        pins = found.pins_on(question.cluster.world_size)
        assert pins.pop("train.global_batch", plan.global_batch) == plan.global_batch
        read_back = {name: attrgetter(name.removeprefix("plan."))(same) for name in pins}
        assert pins == read_back
        assert {"plan.precision", "plan.sharding", "plan.offload", "plan.mesh.tp", "plan.mesh.pp"} <= found.pins.keys()
        assert [each.name for each in found.left_out if "no field" in each.why] == []
        num_read += 1

    check()
    assert num_read >= 4, "too few were emitted to prove much"


@pytest.mark.parametrize(
    ("strategy", "sharding", "mesh"),
    [
        ("FULL_SHARD", "parameters", {"dp_replicate": 1}),
        ("2", "gradients", {"dp_replicate": 1}),
        ("NO_SHARD", "none", {"dp_shard": 1}),
        ("HYBRID_SHARD", "parameters", {"dp_replicate": 2, "dp_shard": 8}),
    ],
)
def test_the_first_version_of_fsdp_is_read(strategy: str, sharding: str, mesh: dict[str, int], tmp_path: Path) -> None:
    found = read(tmp_path, FSDP1.format(strategy=strategy))
    assert (found.tool, found.num_devices) == ("accelerate", 16)
    axes = {f"plan.mesh.{axis}": degree for axis, degree in {**mesh, "tp": 1, "pp": 1, "cp": 1}.items()}
    assert found.pins == {"plan.precision": "bf16", "plan.sharding": sharding, "plan.offload": "none", **axes}
    assert left_out(found)["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == "every block is a unit here"


def test_deepspeed_fields_of_accelerate_are_read_without_a_file(tmp_path: Path) -> None:
    assert read(tmp_path, INLINE_ZERO).pins == {
        "plan.precision": "fp16",
        "plan.sharding": "gradients",
        "plan.engine": "deepspeed",
        "plan.mesh.tp": 1,
        "plan.mesh.pp": 1,
        "plan.mesh.cp": 1,
        "plan.mesh.dp_replicate": 1,
        "plan.offload": "optimizer",
        "plan.grad_accum": 4,
    }


def test_values_that_the_trainer_decides_are_left_to_the_planner(tmp_path: Path) -> None:
    found = read(tmp_path, ZERO3, "ds_config.json")
    pins = found.pins
    assert (pins["plan.sharding"], pins["plan.offload"], pins["plan.micro_batch"]) == ("parameters", "parameters", 4)
    assert not pins.keys() & {"plan.grad_accum", "train.global_batch", "plan.comm.bucket_mb"}
    assert pins["plan.precision"] == "bf16"
    why = left_out(found)
    assert why["gradient_accumulation_steps"] == why["zero_optimization.reduce_bucket_size"]
    assert "Trainer" in why["train_batch_size"]
    assert why["made_up"] == "this is no field that we know"
    known = {name.split(".")[0] for each in found.fields for name in each.name.split(" and ")}
    assert known >= ZERO3.keys(), "every field of the file is a pin, or is named as left out"


def test_tensor_and_sequence_parallelism_of_deepspeed_are_for_the_torch_engine(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4},
              "sequence_parallel_size": 2}  # fmt: skip
    pins = read(tmp_path, config, "ds.json").pins
    assert (pins["plan.mesh.tp"], pins["plan.mesh.cp"], pins["plan.comm.context"]) == (4, 2, "exchange")
    assert "plan.engine" not in pins


def test_a_batch_of_each_rank_implies_the_global_batch(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "tensor_parallel": {"autotp_size": 4},
    }
    assert read(tmp_path, config, "ds.json").pins_on(16)["train.global_batch"] == 64


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "P071", "both bf16 and fp16"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "P071", "offload_param needs"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "P071", "is not a multiple"),
        ({"zero_optimization": {"stage": 7}}, "P070", "7 is not a ZeRO stage"),
        ({"zero_optimization": 3}, "P070", "is not a mapping"),
        ({"train_batch_size": "many"}, "P070", "is not a positive number"),
        ({"some": "file"}, "P070", "neither accelerate's"),
        ("[1, 2]", "P070", "not a mapping"),
        ("{a: [", "P070", "neither YAML nor JSON"),
        ("distributed_type: FSDP\nmixed_precision: int3\n", "P070", "'int3' is none of"),
        ("distributed_type: FSDP\nnum_processes: 5\nnum_machines: 2\n", "P071", "do not fill"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: false}\n",
         "P071", "FULL_SHARD and SHARD_GRAD_OP"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(text: object, code: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert (caught.value.code, what in caught.value.what) == (code, True), caught.value
    assert str(tmp_path) in caught.value.where


def test_the_precision_of_both_files_must_be_the_same(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    text = "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    with pytest.raises(UserError, match="this file is for bf16"):
        read(tmp_path, text)


def test_without_a_precision_of_its_own_accelerates_file_has_that_of_deepspeeds(tmp_path: Path) -> None:
    """As accelerate's template config_yaml_templates/deepspeed.yaml has it."""
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\nnum_processes: 1\n"
    for precision in ("fp16", "bf16"):
        (tmp_path / "ds.json").write_text(json.dumps({precision: {"enabled": True}}))
        assert read(tmp_path, text).pins["plan.precision"] == precision
    (tmp_path / "ds.json").write_text("{}")
    assert read(tmp_path, text).pins["plan.precision"] == "fp32"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1,
                     "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}),
        ("acc.yaml", "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
                     "deepspeed_config: {gradient_accumulation_steps: 1, zero_stage: 3}\n"),
    ],
)  # fmt: skip
def test_without_a_micro_batch_the_batch_is_that_of_the_trainer(
    name: str, text: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, text, name)
    words = ["plan", "llama-3-8b", "--cluster", "8xH100", "--from", str(tmp_path / name)]
    assert main(words) == 0
    assert "no micro-batch in the file: a usual one --set train.global_batch=16" in squeezed(capsys.readouterr().out)
    assert main([*words, "--global-batch", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["global_batch"], answer["plan"]["grad_accum"]) == (8, 1)


@pytest.mark.parametrize(
    ("num_devices", "replicas", "shards"), [(16, 2, 8), (32, 4, 8), (8, 1, 8), (4, 1, 4), (12, 1, 12)]
)
def test_a_file_for_another_number_of_devices_scales_its_data_ranks(
    num_devices: int, replicas: int, shards: int, tmp_path: Path
) -> None:
    hybrid = read(tmp_path, FSDP1.format(strategy="HYBRID_SHARD")).pins_on(num_devices)
    assert (hybrid["plan.mesh.dp_replicate"], hybrid["plan.mesh.dp_shard"]) == (replicas, shards)
    axes = "parallelism_config: {parallelism_config_dp_shard_size: 8, parallelism_config_tp_size: 2}\n"
    found = read(tmp_path, f"distributed_type: FSDP\nmixed_precision: bf16\n{axes}").pins_on(2 * num_devices)
    assert num_devices % int(str(found["plan.mesh.dp_shard"])) == 0


def test_a_file_for_another_number_of_devices_keeps_its_global_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
              "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}  # fmt: skip
    read(tmp_path, config, "ds.json")
    assert main(["plan", "llama-3.2-1b", "--cluster", "16xH100", "--from", str(tmp_path / "ds.json")]) == 0
    assert "on 2x8xH100" in (shown := capsys.readouterr().out)
    assert "--set plan.grad_accum=2" in shown
    read(tmp_path, FSDP1.format(strategy="HYBRID_SHARD"))
    assert main(["plan", "llama-3.2-1b", "--cluster", "8xH100", "--from", str(tmp_path / "file.yaml"), "--json"]) == 0
    mesh = json.loads(capsys.readouterr().out)["plan"]["mesh"]
    assert (mesh["dp_replicate"], mesh["dp_shard"]) == (1, 8)


def test_the_command_shows_the_translation_and_options_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": {},
                                "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}))  # fmt: skip
    words = ["plan", "llama-3.2-1b", "--cluster", "8xH100", "--from", str(file)]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["plan"]["sharding"], answer["plan"]["micro_batch"], answer["global_batch"]) == ("gradients", 2, 64)
    assert "train.global_batch=64" in answer["from"]["settings"]
    assert main([*words, "--set", "plan.sharding=parameters"]) == 0
    shown = capsys.readouterr().out
    assert "zero_optimization.stage 2" in shown
    assert "--set plan.sharding=gradients" in shown
    assert "optimizer {}: the recipe's train section has the optimizer" in shown
    assert "shard parameters" in shown

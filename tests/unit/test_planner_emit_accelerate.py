"""accelerate's own launcher turns the emitted YAML into plugins that match the plan."""

import os
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.emitted import question
from trimaran.core import Mesh, Plan, UserError
from trimaran.planner.emit import emit

SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)


def changed(**fields: Any) -> Plan:
    return Plan.model_validate(SHARDED.model_dump() | fields)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that parses the emitted command with accelerate, in the folder of the emitted files."""

    def launch(plan: Plan, cluster: str = "8xH100") -> Namespace:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: PLC0415

        emission = emit("accelerate", plan, question("llama-3.1-8b", cluster, plan))
        monkeypatch.chdir(tmp_path)
        for name, text in emission.files.items():
            (tmp_path / name).write_text(text)
        arguments = shlex.split(emission.command.replace("$NODE_RANK", "1").replace("$MASTER_ADDR", "10.0.0.1"))
        start = arguments.index("launch") + 1
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments[start:]))
        return args

    return launch


def multi_gpu_environment(args: Namespace) -> dict[str, str]:
    """Return the environment that accelerate starts processes of several GPUs with."""
    from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: PLC0415  it takes a second to import

    return prepare_multi_gpu_env(args)


def parallelism() -> Any:
    """Return the degrees that a process reads from its environment."""
    from accelerate import ParallelismConfig  # noqa: PLC0415

    return ParallelismConfig()


def plugins(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the FSDP plugin that a process builds from the environment of the launcher."""
    from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: PLC0415

    for name, value in multi_gpu_environment(args).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    return FullyShardedDataParallelPlugin()


def test_shards_become_fsdp2(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = launched(changed(recompute="full", offload="parameters", compile=True))
    plugin = plugins(args, monkeypatch)
    assert args.use_fsdp
    assert not args.use_parallelism_config
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (8, 1, "bf16")
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, True)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == "True"
    assert args.training_script_args == ["--per_device_train_batch_size", "2"]


def test_sharded_gradients_keep_the_gathered_weights(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugins(launched(changed(sharding="gradients")), monkeypatch)
    assert plugin.reshard_after_forward is False
    assert not plugin.activation_checkpointing


def test_offloaded_activations_are_the_inputs_of_blocks(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugins(launched(changed(recompute="full", offload="activations")), monkeypatch)
    assert plugin.activation_checkpointing_offload
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


@pytest.mark.parametrize(
    "mesh",
    [{"dp_replicate": 2, "dp_shard": 4}, {"dp_shard": 2, "cp": 4}, {"dp_shard": 2, "tp": 4}, {"cp": 8},
     {"dp_replicate": 2, "dp_shard": 2, "tp": 2}],
)  # fmt: skip
def test_axes_become_a_parallelism_config(mesh: dict[str, int], launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = launched(changed(mesh=mesh))
    plugins(args, monkeypatch)
    sizes, wanted = parallelism(), Mesh(**mesh)
    assert args.use_parallelism_config
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (wanted.dp_replicate, wanted.dp_shard)
    assert (sizes.tp_size, sizes.cp_size, sizes.total_size) == (wanted.tp, wanted.cp, 8)


def test_tp_alone_needs_no_shards(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = launched(changed(mesh={"tp": 8}, sharding="none"))
    for name, value in multi_gpu_environment(args).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    assert args.multi_gpu
    assert parallelism().tp_size == 8


def test_replicas_on_two_nodes_become_ddp(launched: Any) -> None:
    args = launched(changed(mesh={"dp_replicate": 16}, sharding="none", recompute="full"), "2x8xH100")
    assert args.multi_gpu
    assert (args.num_processes, args.num_machines, args.machine_rank) == (16, 2, 1)
    assert multi_gpu_environment(args)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (args.rdzv_backend, args.rdzv_endpoint, args.node_rank, args.nnodes) == ("static", "10.0.0.1:29500", 1, "2")
    assert args.training_script_args == ["--per_device_train_batch_size", "2", "--gradient_checkpointing"]


def test_engine_deepspeed_emits_a_deepspeed_file(launched: Any) -> None:
    args = launched(changed(engine="deepspeed", sharding="optimizer", offload="optimizer"))
    args.deepspeed_fields_from_accelerate_config = ""  # the launcher stores them here for its warnings
    from accelerate.utils.launch import prepare_deepspeed_cmd_env  # noqa: PLC0415

    _, environment = prepare_deepspeed_cmd_env(args)
    assert args.use_deepspeed
    assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds_config.json"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_fp8_uses_torchao(launched: Any) -> None:
    args = launched(changed(precision="fp8"))
    assert (args.mixed_precision, args.fp8_backend) == ("fp8", "AO")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"mesh": {"dp_shard": 4, "pp": 2}}, "plan.mesh.pp"),
        ({"mesh": {"dp_shard": 8, "ep": 2}}, "plan.mesh.ep"),
        ({"sharding": "optimizer"}, "plan.sharding"),
        ({"mesh": {"dp_replicate": 4, "tp": 2}, "sharding": "none"}, "plan.sharding"),
        ({"mesh": {"cp": 8}, "sharding": "none"}, "plan.sharding"),
        ({"mesh": {"cp": 8}, "comm": {"context": "exchange"}}, "plan.comm.context"),
        ({"recompute": "selective"}, "plan.recompute"),
        ({"recompute": 2}, "plan.recompute"),
        ({"offload": "optimizer"}, "plan.offload"),
        ({"offload": "activations"}, "plan.offload"),
        ({"comm": {"reshard": 4}}, "plan.comm.reshard"),
        ({"comm": {"compression": "bf16"}}, "plan.comm.compression"),
        ({"engine": "deepspeed", "mesh": {"dp_shard": 4, "tp": 2}}, "plan.mesh.tp"),
    ],
)
def test_plans_that_accelerate_cannot_express_are_refused(change: dict[str, Any], where: str) -> None:
    plan = changed(**change)
    with pytest.raises(UserError, match="P061: accelerate cannot express") as caught:
        emit("accelerate", plan, question("llama-3.1-8b", "8xH100", plan))
    assert caught.value.where == where
    assert caught.value.fix.endswith(", or emit for another tool")

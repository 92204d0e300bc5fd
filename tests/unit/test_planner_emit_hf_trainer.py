"""The emitted script turns the emitted JSON into real TrainingArguments."""

import json
import os
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emitted import question
from trimaran.core import Mesh, Plan, UserError
from trimaran.models import EAGER_ATTENTION, OutlineLayer
from trimaran.parallel import learning_rate
from trimaran.planner.emit import emit

SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)


def changed(**fields: Any) -> Plan:
    return Plan.model_validate(SHARDED.model_dump() | fields)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that runs the emitted script's `arguments` on the emitted JSON, as far as a CPU allows."""
    before = dict(os.environ)  # TrainingArguments set variables for accelerate

    def build(plan: Plan, **train: Any) -> Any:
        emission = emit("hf-trainer", plan, question("llama-3.1-8b", "8xH100", plan, **train))
        monkeypatch.chdir(tmp_path)
        for name, text in emission.files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        return runpy.run_path("train.py")["arguments"]("training_args.json")

    yield build
    os.environ.clear()
    os.environ.update(before)


def test_the_arguments_have_the_batch_and_sharding_of_the_plan(built: Any) -> None:
    args = built(changed(recompute="full", offload="parameters", compile=True))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    plugin = args.fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["reshard_after_forward"], plugin["cpu_offload"]) == (2, True, True)
    assert plugin["activation_checkpointing"]
    assert (args.mixed_precision, args.torch_compile, args.gradient_checkpointing) == ("bf16", True, False)
    assert args.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert args.average_tokens_across_devices
    assert args.dataloader_num_workers == 0


def test_hybrid_sharding_and_cp_become_a_parallelism_config(built: Any) -> None:
    sizes = built(changed(mesh={"dp_replicate": 2, "dp_shard": 2, "cp": 2})).parallelism_config
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size, sizes.total_size) == (2, 2, 2, 8)


def test_with_replicas_the_model_recomputes_its_blocks(built: Any) -> None:
    args = built(changed(mesh={"dp_replicate": 8}, sharding="none", recompute="full"))
    assert not args.fsdp
    assert args.gradient_checkpointing
    assert args.ddp_bucket_cap_mb == 25


def test_the_deepspeed_file_agrees_with_the_arguments(built: Any) -> None:
    args = built(changed(engine="deepspeed", sharding="gradients", offload="optimizer"), lr=3e-4)
    config = args.hf_deepspeed_config
    assert config.is_zero2()
    assert config.is_offload()
    assert config.get_value("train_batch_size") == 64
    assert [each for each in config.mismatches if "train_batch_size" not in each] == []  # one process here, not 8


def test_8_bit_moments_use_torchao(built: Any) -> None:
    assert built(SHARDED, optimizer={"states": "8bit"}).optim == "adamw_torch_8bit"


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_the_learning_rate_schedule_matches_ours(kind: str, built: Any) -> None:
    from transformers import get_scheduler  # noqa: PLC0415  it takes seconds to import

    train = {"steps": 50, "lr": 1e-3, "schedule": {"kind": kind, "warmup_steps": 5, "floor": 0.1}}
    args = built(SHARDED, **train)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(50), 50, args.lr_scheduler_kwargs
    )
    recipe = question("llama-3.1-8b", "8xH100", SHARDED, **train).recipe
    for step in range(50):
        if step >= 5:  # their warm-up starts at 0, ours with the first step
            assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(step, recipe.train), rel=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"mesh": {"dp_shard": 4, "tp": 2}}, "plan.mesh.tp"),
        ({"mesh": {"dp_shard": 4, "pp": 2}, "pipeline": {"schedule": "zero-bubble"}}, "plan.mesh.pp"),
        ({"precision": "fp8"}, "plan.precision"),
        ({"sharding": "optimizer"}, "plan.sharding"),
        ({"offload": "activations", "recompute": "full"}, "plan.offload"),
        ({"recompute": 2}, "plan.recompute"),
    ],
)
def test_plans_that_the_trainer_cannot_express_are_refused(change: dict[str, Any], where: str) -> None:
    plan = changed(**change)
    with pytest.raises(UserError, match="P061: hf-trainer cannot express") as caught:
        emit("hf-trainer", plan, question("llama-3.1-8b", "8xH100", plan))
    assert caught.value.where == where


def test_shards_on_a_cpu_are_refused_because_accelerate_would_ignore_them() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=2), micro_batch=2)
    emission = emit("hf-trainer", plan, question("tiny", "2xcpu", plan))
    assert json.loads(emission.files["training_args.json"])["use_cpu"]
    for change in ({"sharding": "parameters", "mesh": Mesh(dp_shard=2)}, {"precision": "fp16"}):
        with pytest.raises(UserError, match="P061"):
            emit("hf-trainer", plan.model_copy(update=change), question("tiny", "2xcpu", plan))


def test_the_script_names_eager_attention_only_where_the_model_has_no_other() -> None:
    asked = question("llama-3.1-8b", "8xH100", SHARDED)
    assert asked.outline is not None
    main = asked.outline.main
    runs = tuple(
        (replace(block, operators=EAGER_ATTENTION), count)
        for block, count in main.runs
        if isinstance(block, OutlineLayer)
    )
    eager = replace(asked, outline=replace(asked.outline, towers=(replace(main, runs=runs),)))
    for each, kind in ((asked, "sdpa"), (eager, "eager")):
        assert f'attn_implementation="{kind}"' in emit("hf-trainer", SHARDED, each).files["train.py"]


def test_the_command_has_the_absolute_path_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = question("llama-3.1-8b", "8xH100", SHARDED)
    for path in ("./llama", "llama/config.json"):
        model = asked.recipe.model.model_copy(update={"path": path})
        named = replace(asked, recipe=asked.recipe.model_copy(update={"model": model}))
        assert emit("hf-trainer", SHARDED, named).command.startswith(f"MODEL={tmp_path / 'llama'} ")

"""`trimaran rehearse`: its request, its process group, fewer layers, and the step that it composes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from tests.ranks import run_ranks
from trimaran.app import chosen_ranks, main, read_rehearse_request
from trimaran.core import Mesh, ModelSection, Pipeline, Plan, Recipe, UserError
from trimaran.cost import (
    Job,
    peak_memory_of,
    rank_compute_of,
    rank_memory_of,
    simulate_step,
    stage_compute_of,
    step_costs_of,
    step_time_of,
)
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, VLM_PRESETS, Spec, outline_of
from trimaran.planner import (
    MeasuredRank,
    RankAnswer,
    RankTask,
    RehearsalRequest,
    RehearsedRank,
    compose_step,
    extrapolated,
    predicted_rank,
    refuse_fewer_layers,
    run_rank,
    with_layers,
)
from trimaran.train import BACKEND, MESSAGE_BLOCK, register_backend

PIPELINE = Plan(mesh=Mesh(pp=4, tp=2), grad_accum=8, precision="bf16", pipeline=Pipeline(schedule="1f1b"))
SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", grad_accum=2, precision="bf16", compile=True)
JOB = Job(outline=outline_of(PRESETS["llama-3.1-8b"]), seq_len=4096)
H100 = parse_cluster("8xH100")


def request_of(plan: Plan, *, here: str = "8xH100") -> RehearsalRequest:
    return RehearsalRequest(recipe=Recipe(), spec=PRESETS["llama-3.1-8b"], job=JOB, plan=plan, cluster=H100,
                            here=parse_cluster(here), ranks=(0,), steps=1)  # fmt: skip


def measured_as_predicted(request: RehearsalRequest, pp_rank: int, factor: float) -> RehearsedRank:
    """Return the report of a rank that took `factor` times as long as predicted on the device at hand."""
    plan, cluster = request.plan, request.device_cluster
    cost = predicted_rank(JOB, cluster, plan, pp_rank)
    stages = stage_compute_of(JOB, cluster, plan)
    measured = MeasuredRank(
        peak_bytes=cost.peak_bytes, steady_peak_bytes=cost.peak_bytes, reserved_bytes=0, all_seconds=[],
        step_seconds=factor * cost.seconds, phases={"other": 0.0} | {k: factor * v for k, v in cost.time.items()},
        stages={pp_rank: {"forward": factor * stages[pp_rank][0], "backward": factor * stages[pp_rank][1]}}
        if plan.mesh.pp > 1 else {},
        passes=[], losses=[], num_refused=0, build_seconds=0.0,
    )  # fmt: skip
    return RehearsedRank(rank=0, pp_rank=pp_rank, stages=(pp_rank,), answer=RankAnswer(status="measured"),
                      measured=measured, predicted=cost)  # fmt: skip


@pytest.mark.parametrize("plan", [PIPELINE, SHARDED])
def test_the_slowest_rank_alone_is_the_plans_prediction_without_communication(plan: Plan) -> None:
    memory = peak_memory_of(JOB, H100, plan)
    peaks = [sum(rank_memory_of(JOB, H100, plan, rank)[0].values()) for rank in range(plan.mesh.pp)]
    assert max(peaks) == memory.peak
    time = step_time_of(JOB, H100, plan).terms
    ranks = [rank_compute_of(JOB, H100, plan, rank) for rank in range(plan.mesh.pp)]
    assert all({"comm", "bubble"}.isdisjoint(each) for each in ranks)
    slowest = max(ranks, key=lambda terms: terms["forward"] + terms["backward"])
    assert slowest["forward"] + slowest["backward"] == pytest.approx(time["forward"] + time["backward"], rel=1e-3)


@pytest.mark.parametrize("plan", [PIPELINE, SHARDED])
def test_a_step_composed_of_ranks_as_fast_as_predicted_is_the_simulated_step(plan: Plan) -> None:
    request, simulated = request_of(plan), simulate_step(step_costs_of(JOB, H100, plan)).seconds
    step, why = compose_step(request, [measured_as_predicted(request, 0, 1.0)])
    assert step is not None
    assert not why
    assert step.predicted_seconds == simulated
    assert step.measured_seconds == pytest.approx(simulated)
    slower, _ = compose_step(request, [measured_as_predicted(request, 0, 1.5)])
    assert slower is not None
    compute = predicted_rank(JOB, H100, plan, 0).seconds
    assert slower.measured_seconds >= simulated + 0.5 * compute * 0.99


def test_another_device_at_hand_scales_the_prediction_and_a_cpu_does_not() -> None:
    request = request_of(SHARDED, here="1xA100-80GB")
    step, _ = compose_step(request, [measured_as_predicted(request, 0, 1.2)])
    same, _ = compose_step(request_of(SHARDED), [measured_as_predicted(request_of(SHARDED), 0, 1.2)])
    assert step is not None
    assert same is not None
    assert step.measured_seconds == pytest.approx(same.measured_seconds)
    on_cpu = request_of(SHARDED, here="1xcpu")
    assert compose_step(on_cpu, [measured_as_predicted(on_cpu, 0, 1.0)]) == (
        None, "a CPU says nothing about the time of H100"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, (0, 7)), ("first", (0,)), ("last,first", (7, 0)), ("stages", (0, 2, 4, 6)), ("3, 5,first", (3, 5, 0))],
)
def test_ranks_are_named_by_place_or_number(text: str | None, expected: tuple[int, ...]) -> None:
    assert chosen_ranks(text, PIPELINE) == expected


@pytest.mark.parametrize("text", ["8", "middle", "", "-1", "1e3"])
def test_a_rank_that_the_plan_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="P090"):
        chosen_ranks(f"first,{text}", PIPELINE)


def test_fewer_layers_are_in_every_stage_and_extrapolate_linearly(tmp_path: Path) -> None:
    recipe, plan = with_layers(Recipe(), PIPELINE, 3, tmp_path)
    assert recipe.model.shape == {"layers": 12}
    assert plan.pipeline.stages == (3, 3, 3, 3)

    def measured(layers: int) -> MeasuredRank:
        return MeasuredRank(peak_bytes=100 + 10 * layers, steady_peak_bytes=90 + 10 * layers, reserved_bytes=0,
                            step_seconds=1 + 2.0 * layers, all_seconds=[], phases={"forward": 1 + 2.0 * layers},
                            stages={1: {"forward": 0.5 * layers}}, passes=[], losses=[], num_refused=0,
                            build_seconds=0.0)  # fmt: skip

    whole = extrapolated(measured(3), measured(6), 3, {1: 8})
    assert replace(whole, build_seconds=0.0) == measured(8)


@pytest.mark.parametrize(("changes", "layers"), [({}, 5), ({"recompute": 2}, 3)])
def test_layers_that_cannot_be_rehearsed_are_refused(changes: dict[str, object], layers: int) -> None:
    with pytest.raises(UserError, match="P091"):
        refuse_fewer_layers(Recipe(), PRESETS["llama-3.1-8b"], PIPELINE.model_copy(update=changes), layers)


@pytest.mark.parametrize(("family", "spec"), [("vlm", VLM_PRESETS["tiny"]), ("hf", PRESETS["llama-3.1-8b"])])
def test_only_our_decoder_is_rehearsed_with_fewer_layers(family: str, spec: Spec) -> None:
    recipe = Recipe(model=ModelSection(family=family, path="model"))
    with pytest.raises(UserError, match="P091"):
        refuse_fewer_layers(recipe, spec, PIPELINE, 1)


def test_deepspeed_is_refused() -> None:
    settings = ["plan={engine: deepspeed, mesh: {dp_shard: 2}, sharding: gradients}", "cluster=2xcpu"]
    with pytest.raises(UserError, match="P092"):
        read_rehearse_request(None, {}, settings, ranks=None, steps=1, layers=0)


def test_the_command_imports_no_torch() -> None:
    modules = "trimaran.planner.measure.rehearsal, trimaran.app.plan.rehearse_answer, trimaran.app.plan.rehearse_answer"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def collectives() -> dict[str, Any]:
    """Return what collectives of rank 2 of 4 return, for a part that holds its own rank's numbers."""
    register_backend()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=2, world_size=4)
    part = torch.tensor([2.0, 3.0])
    gathered, received, counts = torch.empty(8), torch.full((MESSAGE_BLOCK + 5,), torch.nan), torch.tensor([5])
    dist.all_gather_into_tensor(gathered, part)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(8.0))
    dist.recv(received, src=1)
    dist.all_reduce(counts)
    dist.all_reduce(part)
    exchanged = torch.empty(3, 2)
    dist.all_to_all_single(exchanged, torch.ones(3, 2), [1, 1, 1, 0], [0, 1, 1, 1])
    functional = funcol.all_gather_tensor(part, 0, [*range(4)])
    found = {
        "gathered": gathered.tolist(), "scattered": scattered.tolist(), "received": bool(received.isfinite().all()),
        "spread": float(received.std()), "counts": counts.tolist(), "sum": part.tolist(),
        "exchanged": exchanged.tolist(), "functional": functional.tolist(),
    }  # fmt: skip
    dist.destroy_process_group()
    return found


def test_collectives_return_numbers_that_can_be_trained_on() -> None:
    (found,) = run_ranks(1, collectives)
    assert found.pop("spread") == pytest.approx(0.01, rel=0.05)
    assert found == {
        "gathered": [2.0, 3.0] * 4, "scattered": [4.0, 5.0], "received": True, "counts": [20], "sum": [2.0, 3.0],
        "exchanged": [[1.0, 1.0]] * 3, "functional": [2.0, 3.0] * 4,
    }  # fmt: skip


def task_of(recipe: Recipe, cache: Path, **plan: object) -> RankTask:
    return RankTask(recipe=recipe, plan=Plan(**plan), rank=0, steps=1, cache=cache, on_cpu=True)  # type: ignore[arg-type]


def test_a_task_and_its_answer_survive_json(tmp_path: Path) -> None:
    task = RankTask(recipe=Recipe(), plan=PIPELINE, rank=3, steps=2, cache=tmp_path, on_cpu=True)
    again = RankTask.from_json(task.as_json())
    assert (again.recipe, again.plan, again.rank) == (task.recipe, task.plan, task.rank)
    found = measured_as_predicted(request_of(PIPELINE), 0, 1.0).measured
    assert found is not None
    measured = replace(found, passes=[("forward", 0, 0)])
    answer = RankAnswer(status="measured", measured=measured)
    assert RankAnswer.from_json(answer.as_json()) == answer


def test_a_rank_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    answer = run_rank(task_of(Recipe(), tmp_path), os.environ, limit_seconds=0.05)
    assert answer.status == "failed"
    assert "took more than" in answer.message


@pytest.mark.slow
def test_a_rank_without_memory_is_an_answer(tmp_path: Path) -> None:
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30,) * 2); "
        "from trimaran.app.main import main; sys.exit(main(sys.argv[1:]))"
    )
    shape = "model.shape={hidden: 8192, heads: 64, kv_heads: 64, ffn: 32768, layers: 8}"
    settings = [
        shape,
        "cluster=2xH100",
        "plan={mesh: {dp_shard: 2}, sharding: parameters}",
        "data.seq_len=64",
        "train.global_batch=2",
    ]
    words = ["rehearse", "--json", *(word for each in settings for word in ("--set", each))]
    environment = os.environ | {"TRIMARAN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", limited, *words], check=False, capture_output=True, text=True,
                          env=environment)  # fmt: skip
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert answer["ranks"][0]["status"] == "out of memory"
    assert answer["ranks"][0]["predicted"]["peak_bytes"] > 2**30


@pytest.mark.slow
def test_what_the_trainer_refuses_is_refused_with_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings = [word for each in ("model.shape.vocab=128", "cluster=1xcpu") for word in ("--set", each)]
    codes = []
    for words in (["rehearse", *settings], ["train", "--run-dir", str(tmp_path / "run"), *settings]):
        assert main(words) == 2
        codes.append(capsys.readouterr().err.split(":")[0].splitlines()[-1])
    assert codes[0] == codes[1]


@pytest.mark.slow
def test_the_command_measures_every_stage_and_composes_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path))
    settings = ["plan={mesh: {pp: 2}, pipeline: {schedule: 1f1b}, micro_batch: 2, grad_accum: 4}", "data.seq_len=64",
                "train.global_batch=8", "model.shape.layers=8"]  # fmt: skip
    words = ["rehearse", "--cluster", "2xcpu", "--steps", "1", "--json"]
    words += [word for each in settings for word in ("--set", each)]
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in whole["ranks"]] == [0, 1]
    assert [each["status"] for each in whole["ranks"]] == ["measured"] * 2
    assert whole["step"]["seconds"] > max(each["measured"]["step_seconds"] for each in whole["ranks"]) * 0.5
    assert main([*words, "--layers", "2"]) == 0
    fewer = json.loads(capsys.readouterr().out)
    for ours, theirs in zip(fewer["ranks"], whole["ranks"], strict=True):
        assert [each["layers"] for each in ours["smaller"]] == [2, 4]
        assert ours["measured"]["peak_bytes"] == pytest.approx(theirs["measured"]["peak_bytes"], rel=0.01)

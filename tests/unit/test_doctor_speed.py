"""Speed rules on recorded runs with one injected problem each (`recorded_runs/`), and on predicted runs on GPUs.

The runs were recorded with the injections of tests/fault/test_doctor_speed.py, on two CPU cores, and are trimmed.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.app import command_of, diagnose_run, main
from trimaran.core import Finding, Plan, Recipe, UserError, parse_recipe
from trimaran.doctor import (
    RULES,
    Evidence,
    apply_patch,
    diagnose,
    forecast,
    read_evidence,
    read_planner_inputs,
    step_breakdown,
)
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run

RECORDED_RUNS = Path(__file__).parent / "recorded_runs"


def findings(evidence: Evidence) -> dict[str, Finding]:
    """Return the findings of the speed rules by code. Each patch must give a valid recipe."""
    found = {each.code: each for each in diagnose(evidence)}
    for each in found.values():
        assert apply_patch(evidence.recipe, each.patch)
        assert each.patch or each.fix, f"{each.code} has neither patch nor fix"
        assert 0 < each.confidence <= 1
    return {code: each for code, each in found.items() if code < "F050"}


def recorded(name: str) -> Evidence:
    return read_evidence(RunDirectory(RECORDED_RUNS / name))


def predicted_run(*settings: str, slower: dict[str, float] | None = None, **keys: Any) -> Evidence:
    """Return a run with the predicted times on the recipe's cluster; phases in `slower` are that many times slower.

    `keys` are added to every line of the metrics. A step waits `waited` seconds for the loader; every tenth stalls
    `stall` seconds for a checkpoint.
    """
    recipe = parse_recipe("", name="test", overrides=settings)
    plan = planned(recipe)
    question = read_planner_inputs(recipe, plan)
    assert question is not None
    prediction = forecast(question, plan)
    terms = {name: prediction.time.get(name, 0.0) * (slower or {}).get(name, 1.0) for name in prediction.time}
    waited, stall = keys.pop("waited", 0.0), keys.pop("stall", 0.0)
    steps = []
    for step in range(1, 61):
        saved = stall if step % 10 == 0 else 0.0
        phases = {"data": waited, "checkpoint": saved, "comm": terms.get("comm", 0.0) + terms.get("bubble", 0.0)}
        phases |= {name: terms[name] for name in ("forward", "backward", "optimizer")}
        line = {
            "step": step,
            "step_seconds": sum(phases.values()),
            "phases": phases,
            "peak_bytes": prediction.peak_bytes,
        }
        loader = {"loader": {"waited": waited, "workers": 2, "depth": 4}} if waited else {}
        steps.append(line | loader | keys)
    plan = plan.model_copy(update={"prediction": prediction})
    return Evidence(recipe=recipe, plan=plan, steps=tuple(steps), planner_inputs=lambda: question)


def planned(recipe: Recipe) -> Plan:
    outline = outline_if_known(recipe.model, recipe.data)
    return choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline)


GPUS = ("model.preset=llama-3.2-1b", "cluster=8xH100", "data.seq_len=2048", "train.global_batch=64")


def test_a_run_as_predicted_has_no_finding() -> None:
    assert findings(predicted_run(*GPUS)) == {}
    assert findings(recorded("healthy")) == {}


def test_too_few_steps_are_no_evidence() -> None:
    evidence = recorded("slow-network")
    assert findings(replace(evidence, steps=evidence.steps[:12])) == {}


@pytest.mark.parametrize(
    ("name", "code", "culprit", "patch"),
    [
        ("slow-loader", "F001", "the loader thread", {"data.workers"}),
        ("slow-network", "F002", "gradients on loopback", {"plan.comm.compression"}),
        ("throttled-rank", "F005", "rank 1", {"plan.micro_batches"}),
        ("small-micro-batch", "F006", "micro-batch 1 x accumulation 16", {"plan.micro_batch", "plan.grad_accum"}),
        ("blocking-checkpoints", "F007", "synchronous checkpoints", {"checkpoint.asynchronous"}),
        ("uneven-stages", "F011", "rank 0", {"plan.pipeline.stages"}),
        ("padding", "F012", "data.samples.batching=pad", {"data.samples.batching"}),
        ("unequal-images", "F013", "image patches", {"data.samples.balance"}),
    ],
)
def test_an_injected_problem_is_found(name: str, code: str, culprit: str, patch: set[str]) -> None:
    found = findings(recorded(name))[code]
    assert found.culprit == culprit
    assert found.patch.keys() == patch
    assert found.step == recorded(name).last_step
    assert found.gain is not None
    assert 0.05 < found.gain < 1


def test_stalls_in_the_first_steps_only_are_no_finding() -> None:
    evidence = predicted_run(*GPUS)
    steps = evidence.steps
    saving = [each | {"phases": each["phases"] | {"checkpoint": 9 * each["step_seconds"]}} for each in steps]
    saving = [each | {"step_seconds": sum(each["phases"].values())} for each in saving]
    assert "F007" not in findings(replace(evidence, steps=(*saving[:8], *steps[8:])))
    assert "F007" in findings(replace(evidence, steps=(*steps[:8], *saving[8:12], *steps[12:-4], *saving[-4:])))


def test_lost_scaling_is_split_by_cause() -> None:
    found = findings(recorded("throttled-rank"))["F014"]
    assert found.culprit == "imbalance: rank 1"
    lost = found.evidence["lost"]
    assert lost["imbalance"] == max(lost.values())
    assert sum(lost.values()) == pytest.approx(1 - found.evidence["efficiency"], abs=1e-3)


def test_a_run_is_only_compared_with_the_same_model_on_fewer_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    slow, other = RunDirectory(RECORDED_RUNS / "throttled-rank"), RunDirectory(RECORDED_RUNS / "unequal-images")
    with pytest.raises(UserError, match="different models") as refused:
        read_evidence(slow, against=other)
    assert refused.value.code == "A019"
    with pytest.raises(UserError, match="does not have fewer ranks: 4 ranks to 4"):
        read_evidence(slow, against=slow)
    assert main(["doctor", "--against", str(slow.path)]) == 2
    assert "RUN --against" in capsys.readouterr().err
    compared = read_evidence(slow, against=RunDirectory(RECORDED_RUNS / "healthy"))
    found = {each.code: each for each in diagnose(compared)}["F014"]
    assert found.evidence["compared"]
    assert found.culprit == "imbalance: rank 1"


def test_a_slow_rank_with_more_tokens_is_blamed_on_the_data() -> None:
    evidence = recorded("throttled-rank")
    tokens = {"min": 512.0, "median": 512.0, "max": 1600.0, "at": 1}
    steps = tuple(
        each | {"ranks": each["ranks"] | {"tokens": tokens}} if "ranks" in each else each for each in evidence.steps
    )
    recipe = apply_patch(evidence.recipe, {"data.samples.balance": False})
    found = findings(replace(evidence, steps=steps, recipe=recipe))["F005"]
    assert found.evidence["kind"] == "data"
    assert found.patch == {"data.samples.balance": True}


def test_a_slow_rank_gets_fewer_rows_unless_they_cannot_be_dealt() -> None:
    evidence = recorded("throttled-rank")
    found = findings(evidence)["F005"]
    assert found.patch == {"plan.micro_batches": "measured"}
    assert "rows by measured speed" in found.expected_effect
    one_row = evidence.plan.model_copy(update={"micro_batch": 1})
    found = findings(replace(evidence, plan=one_row))["F005"]
    assert found.patch == {}
    assert found.fix


def test_a_slow_rank_with_throttled_gpus_names_the_throttle_reason() -> None:
    evidence = recorded("throttled-rank")
    samples = ({"time": 1.0, "node": 0, "ranks": {"1": {}}, "gpus": [{"throttle": ["thermal"]}]},)
    assert "throttled (thermal)" in findings(replace(evidence, samples=samples))["F005"].verdict


def test_a_straggler_incident_of_the_supervisor_becomes_a_finding() -> None:
    evidence = recorded("healthy")
    incident = {"id": "3", "cause": "straggler", "what": "rank 1 is 2.1 times as slow", "suspects": [1], "time": 1.0,
               "evidence": {"slowdown": 2.1}}  # fmt: skip
    found = findings(replace(evidence, incidents=(incident,)))["F005"]
    assert found.culprit == "rank 1"
    assert found.gain == pytest.approx(1 - 1 / 2.1)


def test_small_kernels_on_a_gpu_are_launch_bound() -> None:
    pins = ("plan.micro_batch=1", "plan.grad_accum=64", "plan.compile=false")
    small = ("model.preset=tinyllama-1.1b", "cluster=1xH100", "data.seq_len=256", "train.global_batch=64")
    assert "F003" not in findings(predicted_run(*small, *pins)), "captured steps are launched with a few calls"
    switched_off = findings(predicted_run(*small, *pins, "plan.cuda_graphs=false"))["F003"]
    assert switched_off.patch == {"plan.cuda_graphs": True} or "plan.micro_batch" in switched_off.patch
    small = (*small, "data.isolate_documents=true")  # such steps are not captured
    evidence = predicted_run(*small, *pins)
    found = findings(evidence)["F003"]
    assert found.culprit == "the host"
    assert found.patch["plan.micro_batch"] > 1
    assert found.gain is not None
    assert found.gain > 0.2
    as_fast = predicted_run(*small, *pins, slower={"forward": 0.5, "backward": 0.5})
    assert "F003" not in findings(as_fast), "a run faster than the predicted launch overhead is not launch-bound"


SMALL_GPUS = (
    "model.shape={layers: 8, hidden: 384, heads: 6, kv_heads: 6, ffn: 1024, vocab: 32000}",
    "cluster=8xH100", "data.seq_len=512", "train.global_batch=64",
)  # fmt: skip


def test_a_host_that_limits_the_step_is_found_with_what_helps() -> None:
    overlaps = predicted_run(*SMALL_GPUS, "plan.comm.overlap=true")
    found = findings(overlaps)
    assert found["F003"].patch == {"plan.comm.overlap": False}, "the prediction says it, too"
    step = overlaps.steps[0]["step_seconds"]
    bound = predicted_run(*SMALL_GPUS, "plan.comm.overlap=true", host_seconds=0.95 * step, host_bound=True)
    assert "F016" not in findings(bound), "F003 says the same"
    unknown = replace(bound, planner_inputs=lambda: None)
    found = findings(unknown)
    assert found["F016"].verdict.startswith("the host limits the step")
    assert "plan.comm.overlap=false" in found["F016"].fix
    for settings, hint in {
        ("plan.cuda_graphs=false", "cluster=1xH100"): "plan.cuda_graphs=true",
        ("plan.compile=false", "plan.comm.overlap=true"): "plan.compile=true",
        ("plan.micro_batch=2", "plan.comm.overlap=true"): "a larger plan.micro_batch",
    }.items():
        run = predicted_run(*SMALL_GPUS, *settings, host_seconds=1.0, host_bound=True)
        assert hint in findings(replace(run, planner_inputs=lambda: None))["F016"].fix


def test_a_host_that_is_ahead_or_has_nothing_left_to_change_is_not_the_limit() -> None:
    captured = predicted_run(*SMALL_GPUS)
    assert not captured.plan.comm.overlap
    step = captured.steps[0]["step_seconds"]
    assert "F016" not in findings(predicted_run(*SMALL_GPUS, host_seconds=step, host_bound=True)), "a few milliseconds"
    slow = predicted_run(*SMALL_GPUS, slower={"forward": 30.0}, host_seconds=0.05, host_bound=True)
    assert "trimaran profile" in findings(slow)["F016"].fix
    waits = replace(predicted_run(*GPUS, host_seconds=1.0), planner_inputs=lambda: None)
    assert "F016" not in findings(waits), "the device never waited: the host waits for room in its queue"
    short = replace(predicted_run(*GPUS, host_seconds=1e-3, host_bound=True), planner_inputs=lambda: None)
    assert "F016" not in findings(short), "the host issues the step in a fraction of its time"


def test_a_cpu_is_its_own_host() -> None:
    evidence = recorded("healthy")
    steps = tuple(each | {"host_seconds": each["step_seconds"]} for each in evidence.steps)
    assert "F016" not in findings(replace(evidence, steps=steps))


def test_a_memory_bound_gpu_gets_a_patch() -> None:
    pins = ("plan.micro_batch=8", "plan.grad_accum=1", "plan.precision=bf16", "plan.loss=logits", "plan.compile=false")
    evidence = predicted_run(
        "model.preset=qwen2.5-0.5b", "cluster=1xH100", "data.seq_len=2048", "train.global_batch=8", *pins
    )
    found = findings(evidence)["F004"]
    assert found.culprit == "memory bandwidth"
    assert found.patch == {"plan.loss": "fused"}  # the logits of 151,936 tokens are most of what is moved


def test_a_bucket_of_one_mebibyte_is_too_small() -> None:
    pins = ("plan.mesh.dp_replicate=8", "plan.sharding=none", "plan.comm.bucket_mb=1")
    asked = ("model.preset=tinyllama-1.1b", "cluster=8xA100-80GB", "data.seq_len=512", "train.global_batch=64")
    evidence = predicted_run(*asked, *pins, slower={"comm": 20.0})
    found = findings(evidence)["F010"]
    assert "too small" in found.verdict
    assert found.patch["plan.comm.bucket_mb"] > 1
    usual = predicted_run(*asked, *pins[:2], "plan.comm.bucket_mb=25", slower={"comm": 20.0})
    assert "F010" not in findings(usual)


def test_repeated_recompilations_are_found_with_their_reason() -> None:
    evidence = recorded("healthy")
    why = "tensor 'x' size mismatch at index 0. expected 4, actual 5"
    events = tuple(
        {
            "kind": "recompile",
            "rank": 0,
            "step": step,
            "time": float(step),
            "data": {"what": "forward (a.py:7)", "why": why},
        }
        for step in (10, 12, 14)
    )
    assert "F008" not in findings(replace(evidence, events=events[:2]))
    found = findings(replace(evidence, events=events))["F008"]
    assert (found.culprit, found.evidence["why"]) == ("forward (a.py:7)", why)
    assert found.patch == {"plan.compile": False}
    padded = apply_patch(evidence.recipe, {"data.samples.batching": "bucket"})
    assert findings(replace(evidence, events=events, recipe=padded))["F008"].patch == {"data.samples.batching": "pack"}


def test_host_syncs_in_forward_are_found_in_a_profile() -> None:
    # The summary of a real trace of three steps with an .item() in each of four layers (doctor/evidence.py).
    trace = {"file": "step-00000010-rank-0.trace.json.gz", "steps": 3, "waits": {"aten::_local_scalar_dense": 12},
             "places": {"forward, after aten::max": 12}, "wait_seconds": 1.6e-05}  # fmt: skip
    evidence = recorded("healthy")
    found = findings(replace(evidence, traces=(trace,)))["F009"]
    assert found.culprit == "forward, after aten::max"
    assert found.evidence["waits_a_step"] == 4
    assert "F009" not in findings(replace(evidence, traces=(trace | {"waits": {}, "places": {}},)))


def test_a_wrong_prediction_names_the_part_that_is_off() -> None:
    found = findings(predicted_run(*GPUS, slower={"forward": 1.6, "backward": 1.6}))["F015"]
    assert found.culprit == "compute"
    assert "error bar" in found.verdict


def test_no_patch_for_loader_processes_that_would_not_help() -> None:
    """Two cores allow one loader process beside the rank, which loads no faster than the thread."""
    sample = {"time": 1.0, "node": 0, "cores": 2, "ranks": {"0": {"cpu": 1.0}}}
    slow = recorded("slow-loader")
    gain = findings(replace(slow, samples=(sample | {"cores": 8},)))["F001"].gain
    assert gain is not None
    assert gain > 0.3
    found = findings(replace(slow, samples=(sample,)))["F001"]
    assert (found.patch, found.gain, found.expected_effect) == ({}, None, "")
    assert "no free cores" in found.fix


def test_a_loader_that_waits_for_its_storage_gets_processes_without_free_cores() -> None:
    sample = {"time": 1.0, "node": 0, "cores": 2, "ranks": {"0": {"cpu": 0.5}}}
    slow = recorded("slow-loader")
    waiting = findings(replace(slow, samples=(sample,) * 3))["F001"]
    workers = waiting.patch["data.workers"]
    assert isinstance(workers, int)
    assert workers > 1
    steps = tuple(each | {"loader": each.get("loader", {}) | {"workers": 1}} for each in slow.steps)
    idle, busy = ({"0": {"cpu": 1.0, "loader_cpu": cores}} for cores in (0.1, 1.0))
    found = findings(replace(slow, steps=steps, samples=(sample | {"ranks": idle},)))["F001"]
    assert found.patch.keys() == {"data.workers"}
    found = findings(replace(slow, steps=steps, samples=(sample | {"ranks": busy},)))["F001"]
    assert not found.patch


def test_a_busy_cpu_is_blamed_on_other_processes() -> None:
    evidence = recorded("healthy")
    assert evidence.plan.prediction is not None
    slow = evidence.plan.prediction.model_copy(update={"step_seconds": 0.06})
    evidence = replace(evidence, plan=evidence.plan.model_copy(update={"prediction": slow}),
                       steps=tuple(each | {"step_seconds": 0.2} for each in evidence.steps))  # fmt: skip
    assert "F015" not in findings(evidence), "there are no samples of the node"
    sample = {"time": 1.0, "node": 0, "cpu": 1.0, "cores": 8, "ranks": {"0": {"cpu": 1.0}, "1": {"cpu": 1.0}}}
    found = findings(replace(evidence, samples=(sample,) * 3))["F015"]
    assert (found.culprit, found.evidence["cores_of_others"]) == ("other processes", 6.0)


def test_busy_loaders_checkpoint_stalls_and_unused_memory_are_found_together() -> None:
    """First exercise of the textbook: utilisation of 70 to 90 %, dips every 10 steps, loaders at 100 % CPU."""
    pins = ("plan.micro_batch=1", "plan.grad_accum=8", "plan.compile=true", "plan.recompute=full")
    settings = ("checkpoint.every=10", "data.workers=2", *GPUS, *pins)
    step = forecast_of(*settings)
    ranks = {str(rank): {"cpu": 1.0, "loader_cpu": 2.0} for rank in range(8)}
    sample = {"time": 1.0, "node": 0, "cores": 64, "cpu": 0.5, "ranks": ranks, "gpus": [{"utilisation": 0.8}]}
    evidence = replace(predicted_run(*settings, waited=0.2 * step, stall=step), samples=(sample,) * 3)
    found = findings(evidence)
    assert {"F001", "F006", "F007"} <= found.keys()
    assert found["F001"].culprit == "2 loader processes"
    assert found["F001"].evidence["loader_busy"] == 1.0
    assert found["F001"].patch == {"data.workers": 3}
    assert found["F007"].evidence["every_steps"] == 10
    assert found["F007"].patch == {"checkpoint.every": "auto"}
    assert found["F006"].patch["plan.recompute"] == "none"


def test_waits_inside_layers_are_communication_of_their_axis() -> None:
    """With numbers for each axis nothing is guessed from the length of backward."""
    waits = {"comm": 0.0, "straggler": 0.0, "data": 0.0}
    settings = (*GPUS, "plan.mesh.tp=8")
    hidden = predicted_run(*settings, slower={"backward": 3.0}, waits=waits)
    comm = hidden.steps[0]["phases"]["comm"]
    axes = {"comm_seconds": {"tp": 0.9 * comm, "world": 0.1 * comm}}
    measured = replace(hidden, steps=tuple(each | axes for each in hidden.steps))
    without, found = step_breakdown(hidden), step_breakdown(measured)
    assert without is not None
    assert found is not None
    assert found.comm == pytest.approx(comm)
    assert found.axes == pytest.approx({"tp": 0.9 * comm, "world": 0.1 * comm})
    assert without.comm > found.comm
    unknown = replace(hidden, steps=tuple(each | {"comm_seconds": {"tp": None, "world": 0.0}} for each in hidden.steps))
    guessed = step_breakdown(unknown)
    assert guessed is not None
    assert guessed.comm == pytest.approx(without.comm), "compiled blocks: as without numbers"


def test_the_axis_with_the_most_exposed_communication_is_named() -> None:
    evidence = predicted_run(*GPUS, "plan.mesh.tp=8", slower={"comm": 30.0}, waits={"comm": 0.0, "straggler": 0.0})
    comm = evidence.steps[0]["phases"]["comm"]
    axes = {"comm_seconds": {"tp": 0.9 * comm, "world": 0.1 * comm}}
    found = findings(replace(evidence, steps=tuple(each | axes for each in evidence.steps)))["F002"]
    assert "mostly of tp" in found.verdict
    assert found.evidence["by_axis"]["tp"] == pytest.approx(0.9 * comm)
    assert 0 < found.evidence["predicted_by_axis"]["tp"] < 0.1 * comm


def test_a_speedup_of_5_2_on_8_ranks_is_split_into_its_causes() -> None:
    """Second exercise of the textbook: 65 % efficiency, with communication as the largest loss."""
    usual = forecast_of(*GPUS)
    total = usual / 0.65
    late = {"busy_seconds": {"min": usual, "median": usual, "max": usual + 0.07 * total, "at": 3}}
    waits = {"comm": 0.17 * total, "straggler": 0.07 * total, "data": 0.0}
    evidence = predicted_run(*GPUS, ranks=late, waits=waits, waited=0.05 * total, stall=0.6 * total)
    steps = []
    for each in evidence.steps:
        phases = {**each["phases"], "comm": 0.24 * total}
        own = usual - sum(phases[name] for name in ("forward", "backward", "optimizer"))
        phases["optimizer"] += own  # all time that is not waiting is compute
        steps.append(each | {"phases": phases, "step_seconds": sum(phases.values())})
    found = findings(replace(evidence, steps=tuple(steps)))["F014"]
    assert found.evidence["speedup"] == pytest.approx(5.2, abs=0.05)
    assert found.evidence["lost"] == pytest.approx(
        {"comm": 0.17, "imbalance": 0.07, "sync": 0.06, "data": 0.05}, abs=0.01
    )
    assert found.culprit.startswith("comm")


def forecast_of(*settings: str) -> float:
    recipe = parse_recipe("", name="test", overrides=settings)
    plan = planned(recipe)
    question = read_planner_inputs(recipe, plan)
    assert question is not None
    return forecast(question, plan).step_seconds


def test_every_rule_has_its_own_code() -> None:
    codes = [re.match(r"Yield (F\d{3}) ", rule.__doc__ or "") for rule in RULES]
    assert None not in codes, "the docstring of a rule begins with its code"
    assert len({each[1] for each in codes if each}) == len(RULES)


def test_the_parts_of_a_step_add_up() -> None:
    for path in sorted(RECORDED_RUNS.iterdir()):
        found = step_breakdown(recorded(path.name))
        assert found is not None
        parts = found.data + found.comm + found.straggler + found.bubble + found.checkpoint + found.compute
        assert parts == pytest.approx(found.step)


@pytest.fixture
def slow_network_run(tmp_path: Path) -> RunDirectory:
    old = RunDirectory(RECORDED_RUNS / "slow-network")
    run = create_run(tmp_path / "a run", old.read_recipe(), old.read_plan())
    run.metrics.write_text(old.metrics.read_text())
    run.events(0).write_text(old.events(0).read_text())
    return run


def test_the_doctor_command_prints_the_fix_and_saves_the_findings(slow_network_run: RunDirectory, capsys: Any) -> None:
    assert main(["doctor", str(slow_network_run.path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads(slow_network_run.findings.read_text())
    assert [each["code"] for each in saved["findings"]] == [each["code"] for each in printed["findings"]]
    assert printed["step"] == saved["step"] == 25
    arguments = shlex.split(printed["findings"][0]["command"])
    assert arguments[1:] == ["train", str(slow_network_run.recipe), "--set", "plan.comm.compression=bf16"]
    parse_recipe(slow_network_run.recipe.read_text(), name="test", overrides=[arguments[-1]])
    assert main(["doctor", str(slow_network_run.path)]) == 0
    shown = capsys.readouterr().out
    assert "F002 warning: 5" in shown
    assert "--set plan.comm.compression=bf16" in shown
    assert not list(slow_network_run.path.glob("*.tmp"))


def test_damaged_files_are_skipped(slow_network_run: RunDirectory, capsys: Any) -> None:
    with slow_network_run.metrics.open("a") as file:
        file.write('{"step": "x"}\n{"step": 26, "step_seconds": null, "phases": {}}\n[]\nnonsense\n')
        file.write('{"step": 27, "step_seconds": 1.0, "phases": {"data": "a"}, "ranks": 7}\n')
    (slow_network_run.path / "incidents.jsonl").write_text('{"cause": "straggler", "suspects": null, "time": "now"}\n')
    slow_network_run.profiles.mkdir()
    (slow_network_run.profiles / "step-1-rank-0.trace.json.gz").write_bytes(b"not gzip")
    assert diagnose_run(str(slow_network_run.path), as_json=True) == 0
    assert "F002" in {each["code"] for each in json.loads(capsys.readouterr().out)["findings"]}


def test_a_finding_without_a_patch_has_no_command(slow_network_run: RunDirectory) -> None:
    assert command_of(Finding(code="F005", severity="warning", verdict="slow"), slow_network_run) == ""
    several = Finding(
        code="F011", severity="note", verdict="x", patch={"plan.pipeline.stages": [4, 4], "plan.compile": True}
    )
    assert command_of(several, slow_network_run).endswith("--set 'plan.pipeline.stages=[4, 4]' --set plan.compile=true")

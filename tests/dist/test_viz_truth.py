"""Views against what really happens on gloo ranks: placements, bytes, orders of passes, and the metrics of a run."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.environment import CACHE
from tests.parity import plan_for, train_run
from tests.ranks import run_ranks
from tests.resume import recipe_for
from tests.unit.test_viz_texts import untranslated
from trimaran.core import Mesh, Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import linears_of, outline_for
from trimaran.parallel import build_mesh
from trimaran.planner import Question
from trimaran.runs import RunDirectory, create_run, load_trace
from trimaran.train import StepRecorder, build_networks, join_process_group, read_rank_info, run_worker
from trimaran.ui import (
    OPERATIONS,
    SHORT_NAMES,
    Subject,
    Table,
    Timeline,
    build_view,
    collective_steps,
    gathered_blocks,
    gathered_bytes,
    layers_of,
    read_subject,
)

GROUPED = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 512}
# A layer has slightly more than 1 MiB of gradients, so that each is an FSDP unit of its own.
WIDE = GROUPED | {"layers": 4, "kv_heads": 4}
STEPS = 6


def subject_of(recipe: Recipe, plan: Plan) -> Subject:
    outline = outline_for(recipe.model, recipe.data)
    cluster = parse_cluster(f"{plan.mesh.world_size}xcpu")
    return Subject(question=Question(recipe=recipe, spec=None, outline=outline, cluster=cluster), cluster=cluster,
                   plan=plan)  # fmt: skip


def build(recipe: Recipe, plan: Plan) -> Any:
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    (network,) = build_networks(recipe, plan, rank_info, build_mesh(plan.mesh, device_type="cpu"))
    return network


def split_shapes(recipe: Recipe, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the shape of each linear weight of the first layer on this rank, as DTensor has split it."""
    module = build(recipe, plan).module
    found = {}
    for name, weight in module.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if name.startswith("layers.0.") and weight.ndim == 2:
            found[name] = tuple(local.shape)
    dist.barrier()
    return found


def test_each_linear_is_split_as_drawn() -> None:
    recipe, plan = recipe_for(shape=GROUPED), Plan(mesh=Mesh(tp=2), micro_batch=6)
    subject = subject_of(recipe, plan)
    ((_, layer),) = layers_of(subject)
    drawn = {each.name: tuple(reversed(each.on_rank(2))) for each in linears_of(layer)}  # a weight is outputs x inputs
    for shapes in run_ranks(2, split_shapes, recipe, plan):
        held = {name: shape for name, shape in shapes.items() if name.split(".")[-2] in drawn}
        assert {name.split(".")[-2] for name in held} == drawn.keys()
        assert {name.split(".")[-2]: shape for name, shape in held.items()} == drawn
    (table,) = (each for each in build_view("tensor", subject).modes["explain"].figures if isinstance(each, Table))
    rows = {row[1]: tuple(int(size) for size in re.findall(r"\d+", row[4].replace(",", ""))) for row in table.rows}
    assert {name: rows[name] for name in drawn} == {name: shape[::-1] for name, shape in drawn.items()}


def gathered_elements(path: Path, cache: Path) -> list[int]:
    """Run a worker with FSDP and return the elements of each all-gather of a step, in the order in which they began."""
    steps: list[list[int]] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather, note_batch = getattr(dist, name), StepRecorder.note_batch

    def counted(*values: Any, **options: Any) -> Any:
        if steps:
            tensors = [each for each in (*values, *options.values()) if isinstance(each, torch.Tensor)]
            steps[-1].append(max(each.numel() for each in tensors))  # the output is the larger one
        return gather(*values, **options)

    def note(recorder: StepRecorder, *values: Any) -> None:
        steps.append([])
        note_batch(recorder, *values)

    setattr(dist, name, counted)
    StepRecorder.note_batch = note  # pyrefly: ignore[bad-assignment]
    assert run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache) == 0
    return steps[2]


def test_fsdp_moves_the_bytes_of_the_formula(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"model": {"preset": "tiny", "shape": WIDE}, "data": {"seq_len": 32}, "checkpoint": {"memory": 0},
         "train": {"steps": 4, "global_batch": 4, "sample": {"tokens": 0}, "evaluate": {"batches": 0}}}
    )  # fmt: skip
    plan = plan_for(recipe, dp_shard=2, grad_accum=1, comm={"bucket_mb": 1})
    subject = subject_of(recipe, plan)
    units = gathered_blocks(subject)
    run = create_run(tmp_path / "run", recipe, plan)
    for elements in run_ranks(2, gathered_elements, run.path, CACHE):
        of_layers = [4 * count for count in elements if abs(4 * count / units[0].weight_bytes - 1) < 0.02]
        received = sum(of_layers) / 2  # the other rank's half
        assert received == pytest.approx(gathered_bytes(units, 2, reshards=True), rel=0.01)


def reduced_by_all() -> dict[str, list[int]]:
    """Return what each chunk of this rank has after each collective of torch: bit i is rank i's contribution."""
    join_process_group(read_rank_info(os.environ))
    found = {operation: reduced(operation) for operation in OPERATIONS}
    dist.barrier()
    return found


def reduced(operation: str) -> list[int]:
    rank, num = dist.get_rank(), dist.get_world_size()
    own = torch.full((num,), 1 << rank)
    result = torch.zeros(num, dtype=own.dtype)
    match operation:
        case "all-reduce":
            dist.all_reduce(own)
            result = own
        case "broadcast":
            dist.broadcast(own, src=0)
            result = own
        case "all-gather":
            dist.all_gather_into_tensor(result, own[:1].clone())
        case "reduce-scatter":
            part = torch.zeros(1, dtype=own.dtype)
            dist.reduce_scatter_tensor(part, own)
            result[rank] = part[0]
    return result.tolist()


def test_collectives_end_with_the_buffers_of_torch() -> None:
    ranks = 4
    theirs: list[dict[str, Any]] = run_ranks(ranks, reduced_by_all)
    for operation in OPERATIONS:
        for algorithm in ("ring", "tree", "hierarchical") if operation == "all-reduce" else ("ring",):
            held = collective_steps(operation, algorithm, ranks)[-1].held
            for rank in range(ranks):
                ours = [sum(1 << each for each in parts) for parts in held[rank]]
                if operation == "reduce-scatter":  # of the other chunks a rank has parts, which nobody looks at
                    ours = [value if chunk == rank else 0 for chunk, value in enumerate(ours)]
                assert ours == theirs[rank][operation], f"{operation}, {algorithm}"


SMALL = {"layers": 4, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 64}


def recipe_of(**telemetry: Any) -> Recipe:
    return Recipe.model_validate(
        {"model": {"preset": "tiny", "shape": SMALL}, "data": {"seq_len": 32}, "cluster": "2xcpu",
         "train": {"steps": STEPS, "global_batch": 8, "sample": {"tokens": 0}, "evaluate": {"batches": 0}},
         "telemetry": telemetry}
    )  # fmt: skip


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    recipe = recipe_of()
    folder = tmp_path_factory.mktemp("replicated") / "runs"
    folder.mkdir()
    return train_run(recipe, plan_for(recipe, dp_replicate=2, grad_accum=1), folder)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    recipe = recipe_of(profile="3:4", profile_ranks="all")
    folder = tmp_path_factory.mktemp("piped") / "runs"
    folder.mkdir()
    return train_run(recipe, plan_for(recipe, pp=2, grad_accum=4), folder)


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_the_exposed_communication_of_a_run_is_that_of_its_metrics(replicated: RunDirectory) -> None:
    subject, lines = read_subject(None, str(replicated.path), None, (), ()), lines_of(replicated)
    assert subject.run is not None
    assert subject.run.comm_seconds == {axis: pytest.approx(median(line["comm_seconds"][axis] for line in lines))
                                        for axis in lines[0]["comm_seconds"]}  # fmt: skip
    assert subject.run.last.comm == tuple(line["phases"]["comm"] for line in lines)
    live = build_view("ddp", subject).modes["live"]
    table = next(each for each in live.figures if isinstance(each, Table))
    assert [row[0] for row in table.rows] == ["dp_replicate", "all ranks"]
    compared = [line["ranks"]["busy_seconds"]["at"] for line in lines if "ranks" in line]
    assert sum(subject.run.slowest.values()) == len(compared)
    assert {rank: compared.count(rank) for rank in set(compared)} == subject.run.slowest


def test_a_pipeline_is_drawn_in_the_order_that_its_ranks_executed(piped: RunDirectory) -> None:
    settings = ["schedule=1f1b", "ranks=2", "micro_batches=4"]
    view = build_view("pipeline", read_subject(None, str(piped.path), None, (), settings))
    for mode in ("explain", "simulate", "live"):
        (timeline,) = (each for each in view.modes[mode].figures if isinstance(each, Timeline))
        for rank in range(2):
            drawn = sorted((each for each in timeline.spans if each.row == rank), key=lambda each: each.start)
            trace = load_trace(piped.profiles / f"step-00000003-rank-{rank}.trace.json.gz")
            done = [phase for *_, phase, step in trace.host_phases if phase in ("forward", "backward") and step == 3]
            assert [each.kind for each in drawn] == done, mode


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_every_view_of_a_real_run_has_three_modes_and_all_its_texts_in_chinese(
    name: str, replicated: RunDirectory, piped: RunDirectory
) -> None:
    for run in (replicated, piped):
        view = build_view(name, read_subject(None, str(run.path), None, (), ()))
        assert set(view.modes) == {"explain", "simulate", "live"}
        assert all(mode.sentences or mode.figures for mode in view.modes.values())
        assert untranslated(view) == set()


def test_a_run_without_a_step_says_that_nothing_is_measured(replicated: RunDirectory) -> None:
    subject = replace(read_subject(None, str(replicated.path), None, (), ()), run=None)
    assert "not finished a step" in build_view("need", subject).modes["live"].sentences[0]
    assert build_view("life", subject).modes["live"].figures

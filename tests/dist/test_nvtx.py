"""NVTX ranges of steps, phases, layers and collectives, as a tool receives them from the ranks of real runs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cases import slow
from tests.nvtx_tool import read_ranges, use_nvtx_tool
from tests.parity import plan_for, train_run, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Recipe
from trimaran.nets import Network
from trimaran.train import StepClock, StepRanges

PHASES = ["data", "forward", "comm", "backward", "comm", "checkpoint", "optimizer", "data", "checkpoint", "data"]
CPU = torch.device("cpu")
EVALUATE = {"every": 2, "batches": 1}
SHAPE = {"layers": 4, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32}


class Block(nn.Module):
    """A layer that another one may follow; `fails` raises in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no forward")
        return self.linear(x)


def in_ranges_and_without(compiled: bool) -> dict[str, Any]:
    """Compute two blocks with ranges, then without; the first input needs no gradient. Returns what was compiled."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    blocks = first, second = Block(), Block()
    module = nn.Sequential(first, second)
    if compiled:
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)  # a graph break would be an error
    module(torch.ones(1, 4))
    calls = [block.__dict__.get("_compiled_call_impl") for block in blocks]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    clock = StepClock(CPU)
    ranges = StepRanges(clock)
    ranges.follow([Network(module=module, blocks=blocks, spec=None)])
    for step in (7, 8):
        ranges.install(step)
        clock.enter("forward")
        loss = module(torch.ones(1, 4)).sum()
        clock.lap("forward", then="backward")
        worker = threading.Thread(target=loss.backward)  # as autograd has one for a GPU
        worker.start()
        worker.join()
        clock.enter("comm")
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        if step == 8 and not compiled:
            second.fails = True
            with pytest.raises(RuntimeError, match="no forward"):
                module(torch.ones(1, 4))
        ranges.remove()
        clock.lap("comm", then="optimizer")
        first(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(torch.ones(2))
    same = [block.__dict__.get("_compiled_call_impl") for block in blocks] == calls
    return {"same": same, "more_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs}


@pytest.mark.parametrize("compiled", [False, True])
def test_ranges_nest_on_every_thread_and_leave_nothing_behind(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = use_nvtx_tool(tmp_path, monkeypatch)
    assert run_ranks(1, in_ranges_and_without, compiled) == [{"same": True, "more_graphs": 0}]
    (threads,) = read_ranges(output)
    trained, *backwards = threads.values()
    expected = ["step 7", "step 7 > data", "step 7 > forward", "step 7 > forward > forward 0",
                "step 7 > forward > forward 1", "step 7 > backward", "step 7 > comm",
                "step 7 > comm > all_reduce world 16 B"]  # fmt: skip
    assert trained[0].paths() == expected
    failed = [] if compiled else ["step 8 > comm > forward 0", "step 8 > comm > forward 1"]
    assert trained[1].paths() == [each.replace("step 7", "step 8") for each in expected] + failed
    assert len(trained) == 2
    assert [[each.text for each in thread] for thread in backwards] == 2 * [["backward 1", "backward 0"]]


def recipe_of(**telemetry: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE},
            "data": {"seq_len": 32},
            "train": {"steps": 4, "global_batch": 8, "sample": {"tokens": 0}, "evaluate": EVALUATE},
            "telemetry": telemetry,
        }
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2, "recompute": "full"},
        slow({"dp_replicate": 2}),
        slow({"dp_replicate": 2, "engine": "deepspeed"}),
        slow({"tp": 2, "recompute": "selective"}),
        slow({"dp_shard": 2, "tp": 2}),
        slow({"dp_shard": 2, "recompute": "full", "compile": True}),
        slow({"pp": 2, "pipeline": {"schedule": "1f1b"}, "grad_accum": 2, "recompute": "full"}),
        slow({"pp": 2, "pipeline": {"schedule": "zero-bubble"}, "grad_accum": 4}),
    ],
    ids=str,
)
def test_the_steps_of_the_recipe_have_ranges_on_every_rank_without_effect_on_training(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    plain, recipe = recipe_of(), recipe_of(nvtx=True, profile="2:4", profile_ranks="all")
    plan = plan_for(recipe, **({"grad_accum": 1} | fields))
    output = use_nvtx_tool(tmp_path, monkeypatch)
    reference = trajectory_of(train_run(plain, plan, folder))
    assert list(output.iterdir()) == []
    assert trajectory_of(train_run(recipe, plan, folder)).losses == reference.losses
    found = read_ranges(output)
    assert len(found) == plan.mesh.world_size
    layers = dict.fromkeys(("forward", "backward"), 0)
    for threads in found:
        (steps,) = threads.values()  # on a CPU autograd computes in the thread that trains
        assert [each.text for each in steps] == ["step 2", "step 3"]
        phases = ["data", "comm", *PHASES[5:]] if "pp" in fields else PHASES
        assert [[each.text for each in step.inside] for step in steps] == [phases, ["data", "evaluation", *phases]]
        trained = [each for step in steps for each in step.inside if each.text != "evaluation"]
        texts = [each.text for phase in trained for each in phase.all()]
        for way in layers:
            layers[way] += sum(text.startswith(f"{way} layers.") for text in texts)
        collective = {"dp_shard": "reduce_scatter", "pp": "send"}.get(next(iter(fields)), "all_reduce")
        groups = {text.split()[1] for text in texts if text.startswith(f"{collective} ")}
        assert groups >= ({"shard", "tp"} if plan.mesh.world_size == 4 else {"world"})
    pipelines = plan.mesh.world_size // plan.mesh.pp
    assert layers == dict.fromkeys(layers, 2 * SHAPE["layers"] * plan.grad_accum * pipelines)


def test_without_named_steps_all_have_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, folder, recipe = use_nvtx_tool(tmp_path, monkeypatch), tmp_path / "runs", recipe_of(nvtx=True)
    folder.mkdir()
    train_run(recipe, plan_for(recipe, grad_accum=1), folder)
    (threads,) = read_ranges(output)
    (steps,) = threads.values()
    assert [each.text for each in steps] == [f"step {number}" for number in (1, 2, 3, 4, 5)]
    assert steps[-1].paths() == ["step 5", "step 5 > data"]  # which was about to start

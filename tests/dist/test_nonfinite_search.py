"""The search finds the module and the rank that first produced a NaN, and whether in forward or backward."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import slow
from tests.dist.test_guard import recipe_with
from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.nets import Network
from trimaran.runs import RunDirectory, create_run
from trimaran.train import build, read_rank_info, run_worker
from trimaran.train.features import nonfinite_search

BAD = 3


@dataclass(frozen=True)
class NanFault:
    """NaN in one module of one rank, whenever it sees the samples of step `BAD`; with `once` only the first time.

    `call` is the number of the forward that sees them first. Without `rank`, every rank produces NaN from the samples
    that rank 1 sees first.
    """

    module: str
    rank: int | None = 1
    gradient: bool = False
    once: bool = False
    call: int = BAD


def plant(fault: NanFault, shared: Path = Path("bad-samples")) -> None:
    """Add the fault to the networks that this process will build. Ranks share the bad samples in a file."""
    build_networks, seen = build.build_networks, []
    state = {"bad": False}

    def check_tokens(module: torch.nn.Module, args: Any, fields: dict[str, Any]) -> None:
        seen.append(fields["tokens"].clone())
        again = len(seen) > fault.call and torch.equal(seen[-1], seen[fault.call - 1]) and not fault.once
        state["bad"] = len(seen) == fault.call or again
        if fault.rank is None:
            digest = str(hash(tuple(seen[-1].flatten().tolist())))
            if len(seen) == fault.call and os.environ["RANK"] == "1":
                shared.write_text(digest)
            state["bad"] = shared.exists() and shared.read_text() == digest

    def corrupt(module: torch.nn.Module, args: Any, out: Tensor) -> Tensor:
        if not state["bad"]:
            return out
        if not fault.gradient:
            return out * math.nan
        out.register_hook(lambda gradient: gradient * math.nan)
        return out

    def with_fault(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        for network in networks:
            network.module.register_forward_pre_hook(check_tokens, with_kwargs=True)
            for name, module in network.module.named_modules():
                if name == fault.module:
                    module.register_forward_hook(corrupt)
        return networks

    build.build_networks = with_fault  # pyrefly: ignore[bad-assignment]


def train_with_fault(path: Path, fault: NanFault, searches: int = nonfinite_search.MAX_SEARCHES) -> int:
    run, rank_info = RunDirectory(path), read_rank_info(os.environ)
    nonfinite_search.MAX_SEARCHES = searches  # pyrefly: ignore[bad-assignment]
    if fault.rank in (rank_info.rank, None):
        plant(fault, path / "bad-samples")
    return run_worker(run, rank_info, cache=CACHE)


def run_with_fault(path: Path, ranks: int, fault: NanFault, fields: dict[str, Any], searches: int = 3) -> RunDirectory:
    recipe = recipe_with(train={"steps": 4})
    run = create_run(path, recipe, plan_for(recipe, **({"grad_accum": 1} | fields)))
    assert run_ranks(ranks, train_with_fault, run.path, fault, searches) == [0] * ranks
    return run


def skip_event(run: RunDirectory) -> dict[str, Any]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    (skip,) = [each for each in events if each["kind"] == "skip"]
    assert skip["step"] == BAD
    return skip["data"]


@pytest.mark.parametrize(
    ("fields", "fault", "expected"),
    [
        ({"dp_replicate": 2}, NanFault("layers.1.mlp.up_proj"), ("layers.1.mlp.up_proj", "output", 1)),
        slow(({"dp_shard": 2}, NanFault("layers.0.mlp"), ("layers.0.mlp", "output", 1))),
        slow(({"tp": 2}, NanFault("layers.1.mlp"), ("layers.1.mlp", "output", 1))),
        ({"pp": 2, "grad_accum": 2}, NanFault("layers.0.mlp", rank=0, call=5), ("layers.0.mlp", "output", 0)),
        ({"dp_replicate": 2}, NanFault("layers.0.mlp", gradient=True), ("layers.0.mlp", "gradient", 1)),
        slow(({"dp_replicate": 2}, NanFault("layers.0.mlp", once=True), ("", "not again", None))),
    ],
    ids=["replicas", "shards", "tensor", "pipeline", "gradient", "once"],
)
def test_the_module_and_the_rank_that_first_produced_a_nan_are_reported(
    tmp_path: Path, fields: dict[str, Any], fault: NanFault, expected: tuple[str, str, int | None]
) -> None:
    origin = skip_event(run_with_fault(tmp_path / "run", 2, fault, fields))["born"]
    assert (origin["module"], origin["what"]) == expected[:2]
    assert origin["rank"] == expected[2] or "tp" in fields  # tensor-parallel ranks all have it then
    assert (fault.rank in origin["ranks"]) == (not fault.once)


@pytest.mark.parametrize(
    ("fields", "fault", "again"),
    [
        ({"dp_replicate": 2}, NanFault("layers.1.mlp", rank=None), True),
        ({"dp_replicate": 2}, NanFault("layers.1.mlp"), False),
        slow(({"dp_replicate": 2}, NanFault("layers.1.mlp", once=True), False)),
        slow(({"dp_shard": 2}, NanFault("layers.0.mlp", rank=None, gradient=True), True)),
        slow(({"dp_shard": 2}, NanFault("layers.0.mlp"), False)),
        slow(({"dp_shard": 2, "tp": 2}, NanFault("layers.0.mlp"), False)),
        slow(({"dp_replicate": 2, "pp": 2, "grad_accum": 2}, NanFault("layers.0.mlp", call=5), False)),
    ],
    ids=["replicas-data", "replicas-device", "once", "shards-data", "shards-device", "tensor", "pipeline"],
)
def test_the_same_batch_on_another_rank_tells_data_from_device(
    tmp_path: Path, fields: dict[str, Any], fault: NanFault, again: bool
) -> None:
    ranks = 4 if len(fields) > 1 else 2
    event = skip_event(run_with_fault(tmp_path / "run", ranks, fault, fields))
    reproduced = event["reproduced"]
    assert (reproduced["again"], reproduced["same_device"]) == (again, False)
    assert reproduced["on_rank"] in ((2, 3) if "tp" in fields else (0,))  # the group of rank 1 is the first with tp
    assert ("suspect the device of rank" in reproduced["verdict"]) == (not again), reproduced


def test_a_single_group_computes_the_same_batch_again_and_says_so(tmp_path: Path) -> None:
    for once in (False, True):
        fault = NanFault("layers.0.mlp", rank=0, once=once)
        reproduced = skip_event(run_with_fault(tmp_path / f"{once}", 1, fault, {}))["reproduced"]
        assert (reproduced["again"], reproduced["same_device"]) == (not once, True)


@pytest.mark.parametrize("fields", [{"precision": "bf16", "grad_accum": 1}, slow({})], ids=str)
def test_the_search_does_not_change_the_losses(tmp_path: Path, fields: dict[str, Any]) -> None:
    fault = NanFault("layers.0.mlp", rank=0, gradient=True)
    runs = [run_with_fault(tmp_path / f"{number}", 1, fault, fields, number) for number in (3, 0)]
    assert [("born" in skip_event(run)) for run in runs] == [True, False]
    losses = [[json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()] for run in runs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4

"""The meters of a rank: group norms, memory, hardware FLOPs utilisation, and the comparison of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.runs import PREDICTION
from tests.unit.test_train_optimizer import section
from tests.unit.test_train_split_bf16 import split_matrices
from trimaran.core import Flops, Plan, Recipe
from trimaran.machine import total_bytes
from trimaran.parallel import NO_SPLIT_WEIGHTS, build_optimizer
from trimaran.train import (
    MEASURES,
    MIN_SAMPLED_VALUES,
    GroupMeter,
    MemoryMeter,
    Meters,
    RankStats,
    allocator_memory,
    lr_factors,
    merge_layers,
    module_of,
    rank_measures,
    sample_values,
    summarise_ranks,
    wait_phases,
)

CPU = torch.device("cpu")
PHASES = {"data": 0.1, "forward": 0.3, "backward": 0.4, "comm": 0.15, "optimizer": 0.04, "checkpoint": 0.01}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("embed_tokens.weight", "embed_tokens"),
        ("layers.3.self_attn.q_proj.weight", "layers.3"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("vision.patch_embed.proj.bias", "vision.patch_embed.proj"),
        ("0.weight", "0"),
        ("logit_scale", "logit_scale"),
    ],
)
def test_a_parameter_belongs_to_its_layer_or_to_the_module_that_has_it(name: str, module: str) -> None:
    assert module_of(name) == module


def test_neighbouring_layers_are_merged_until_there_are_few_enough_groups() -> None:
    modules = ["embed", *(f"layers.{number}" for number in range(10)), "norm", "head"]
    assert merge_layers(modules) == {module: module for module in modules}
    groups = merge_layers(modules, max_groups=7)
    assert list(dict.fromkeys(groups.values())) == [
        "embed", "layers.0-2", "layers.3-5", "layers.6-8", "layers.9", "norm", "head",
    ]  # fmt: skip
    assert groups["layers.4"] == "layers.3-5"


def test_any_number_of_modules_fits_into_the_groups() -> None:
    assert len(set(merge_layers([f"layers.{number}" for number in range(1000)]).values())) <= 64
    wide = merge_layers([f"tower{number}.norm" for number in range(100)], max_groups=8)
    assert len(set(wide.values())) == 8
    assert (wide["tower3.norm"], wide["tower99.norm"]) == ("tower3", "other")


def test_sampled_values_cover_all_columns_of_a_large_tensor() -> None:
    table = torch.arange(512.0).repeat(512, 1)  # a value is its column
    seen = sample_values(table)
    assert MIN_SAMPLED_VALUES / 2 <= len(seen) <= 2 * MIN_SAMPLED_VALUES
    assert len(seen.unique()) == 512
    assert torch.equal(sample_values(table[:4, :4].contiguous()), table[:4, :4].flatten())
    assert len(sample_values(table.t())) <= 2 * MIN_SAMPLED_VALUES, "a tensor that is not contiguous is sampled too"


class TwoMatrices(nn.Module):
    """A matrix that is sampled and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(256, 300, generator=generator))
        self.small = nn.Parameter(torch.randn(8, 8, generator=generator))


def measure_update(
    states: str, *, halves: bool = False, refused: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the meter measures of one update, and the exact values from copies of the weights."""
    module = TwoMatrices()
    split = split_matrices(module) if halves else NO_SPLIT_WEIGHTS
    optimizer = build_optimizer([module], section(states), Plan(), split=split)
    if refused:
        optimizer.found_inf = torch.ones(())  # pyrefly: ignore[missing-attribute]
    generator = torch.Generator().manual_seed(1)
    for each in module.parameters():
        each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
    groups = {name: [each] for name, each in module.named_parameters()}

    def full_weights() -> dict[str, Tensor]:
        return {name: split.full_tensor(each).clone() for name, (each,) in groups.items()}

    meter, before = GroupMeter(groups, split, every=1, pp=1, device=CPU), full_weights()
    snapshot = meter.begin()
    norms = {name: cast(Tensor, each.grad).float().norm().item() for name, (each,) in groups.items()}
    optimizer.step()
    measured, after = meter.end(snapshot, scale=4.0)()["groups"], full_weights()
    exact = {
        name: {"grad_norm": norms[name] / 4, "update_ratio": ((each - before[name]).norm() / each.norm()).item()}
        for name, each in after.items()
    }
    return measured, exact


@pytest.mark.parametrize(("states", "halves"), [("fp32", False), ("bf16", False), ("8bit", False), ("fp32", True)])
def test_an_update_is_measured_on_the_weights_for_any_format_of_the_states(states: str, *, halves: bool) -> None:
    measured, exact = measure_update(states, halves=halves)
    assert measured["small"] == pytest.approx(exact["small"], rel=1e-5)
    assert measured["large"]["grad_norm"] == pytest.approx(exact["large"]["grad_norm"], rel=1e-5)
    assert measured["large"]["update_ratio"] == pytest.approx(exact["large"]["update_ratio"], rel=0.1)
    assert measured["small"]["update_ratio"] > 0


def test_a_refused_update_has_an_update_ratio_of_zero() -> None:
    measured, _ = measure_update("bf16", refused=True)
    assert [each["update_ratio"] for each in measured.values()] == [0.0, 0.0]


def test_the_first_update_is_measured_and_then_every_nth() -> None:
    def measured(every: int) -> list[bool]:
        meter = GroupMeter({}, every=every, pp=1, device=CPU)
        return [meter.begin() is not None for _ in range(7)]

    assert measured(3) == [True, False, False, True, False, False, True]
    assert not any(measured(0))


def test_a_rank_without_parameters_contributes_zeros() -> None:
    meter = GroupMeter({"embed": [], "head": []}, every=1, pp=1, device=CPU)
    measured = meter.end(meter.begin(), scale=1.0)()
    assert measured == {"groups": {each: {"grad_norm": 0.0, "update_ratio": 0.0} for each in ("embed", "head")}}


def test_the_allocators_statistics_become_the_memory_metrics() -> None:
    stats = {
        "allocated_bytes": {"all": {"current": 600, "peak": 900}},
        "reserved_bytes": {"all": {"current": 1000, "peak": 1000}},
        "inactive_split_bytes": {"all": {"current": 250, "peak": 300}},
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    assert allocator_memory(stats) == {
        "allocated": 600, "reserved": 1000, "fragmentation": 0.25, "retries": 3, "ooms": 1,
    }  # fmt: skip
    assert allocator_memory({})["fragmentation"] == 0.0


def test_on_a_cpu_the_memory_is_the_resident_memory_and_that_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("123456\n")
    assert total_bytes(tmp_path) == 123456
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path) == total_bytes(tmp_path / "nowhere") > 1 << 28
    meter = MemoryMeter(CPU)
    peak, before = meter.read()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert meter.read()[1]["allocated"] - before["allocated"] >= 0.5 * held.nbytes
    assert peak >= 0.9 * before["allocated"] > 0  # the system counts the two at different moments


def test_after_the_first_steps_the_memory_is_read_ten_times_a_second() -> None:
    times = iter([*range(20), *(20 + 0.03 * number for number in range(100))])
    meter = MemoryMeter(CPU, now=lambda: next(times))
    fields = [meter.read()[1] for _ in range(120)]  # the same object until the memory is read again
    is_read = [number == 0 or fields[number] is not fields[number - 1] for number in range(120)]
    assert all(is_read[:20])
    assert sum(is_read) == 20 + 25
    assert is_read[20:25] == [True, False, False, False, True]


def test_recomputed_flops_count_for_hfu_and_not_for_mfu() -> None:
    measured = PREDICTION.model_copy(update={"repeated_flops": Flops(2e9)})
    meters = Meters(
        plan=Plan(prediction=measured), memory=MemoryMeter(CPU), lr_factors={"vision": 0.1, "language": 1.0}
    )
    _, details = meters.read(1, lr=2e-3, tokens=5, phases=PHASES)
    assert details["hfu"] == pytest.approx((1e10 + 2e9) / 1e11)
    assert details["lrs"] == pytest.approx({"vision": 2e-4, "language": 2e-3})
    assert "ranks" not in details


def test_learning_rates_are_in_the_metrics_only_if_trained_towers_have_different_ones() -> None:
    def factors(freeze: tuple[str, ...] = (), **towers: Any) -> dict[str, float]:
        tree = {"train": {"lr": 1e-3, "optimizer": {"towers": towers}}, "model": {"freeze": freeze}}
        return lr_factors(Recipe.model_validate(tree), ("vision", "projector", "language"))

    assert factors(vision={"weight_decay": 0.0}) == {}
    assert factors(("projector",), vision={"lr": 1e-4}) == pytest.approx({"vision": 0.1, "language": 1.0})


def test_busy_data_and_wait_seconds_add_up_to_the_step() -> None:
    measured = rank_measures(PHASES, peak=7, tokens=9)
    assert sum(measured[name] for name in MEASURES[:3]) == pytest.approx(sum(PHASES.values()))
    assert measured["wait_seconds"] == PHASES["comm"]
    waits = wait_phases(PHASES, 0.05)
    assert waits == pytest.approx({"data": 0.1, "comm": 0.1, "straggler": 0.05})
    assert wait_phases(PHASES, 10.0)["comm"] == 0.0, "straggler time is at most the communication time"


def rank_table(**columns: list[float]) -> list[tuple[float, ...]]:
    size = len(next(iter(columns.values())))
    return list(zip(*(columns.get(name, [1.0] * size) for name in MEASURES), strict=True))


def test_the_sums_of_what_the_ranks_send_are_compared_on_rank_0() -> None:
    ranks = [RankStats(rank=rank, num_ranks=3) for rank in range(3)]
    assert ranks[0].summary([0.0] * len(ranks[0].counts)) == {}, "nothing is measured before the first step"
    for rank, each in enumerate(ranks):
        each.measure(7, rank_measures(PHASES, peak=2**40 + rank, tokens=9))
    sums = [float(sum(column)) for column in zip(*(each.counts for each in ranks), strict=True)]
    measured = ranks[0].summary(sums)
    assert measured["step"] == 7
    assert measured["peak_bytes"] == {"min": 2**40, "median": 2**40 + 1, "max": 2**40 + 2, "at": 2}
    wait = PHASES["comm"]
    assert measured["wait_seconds"] == {"min": wait, "median": wait, "max": wait, "at": 0}
    assert ranks[1].summary(sums) == {}, "only rank 0 writes metrics"


def test_the_rank_that_others_wait_for_is_an_outlier() -> None:
    measured = summarise_ranks(
        rank_table(busy_seconds=[1.0, 1.1, 2.0, 1.0], data_seconds=[0.0] * 4, wait_seconds=[1, 0.9, 0, 1]), 4
    )
    assert measured["busy_seconds"] == {"min": 1.0, "median": 1.05, "max": 2.0, "at": 2}
    assert measured["outliers"] == [{"rank": 2, "what": "busy_seconds", "value": 2.0, "median": 1.0}]
    assert measured["late_seconds"] == 1.0


def test_noise_and_long_waits_are_not_outliers() -> None:
    busy, data = (
        [1.0, 1.1, 0.9, 1.05],
        [0.001, 0.004, 0.002, 0.001],
    )  # four times as long, but a negligible part of a step
    measured = summarise_ranks(rank_table(busy_seconds=busy, data_seconds=data, wait_seconds=[0.1, 0.0, 0.5, 0.1]), 4)
    assert measured["outliers"] == []


def test_one_of_two_ranks_can_be_an_outlier() -> None:
    outliers = summarise_ranks(rank_table(busy_seconds=[1.4, 1.0]), 2)["outliers"]
    assert outliers == [{"rank": 0, "what": "busy_seconds", "value": 1.4, "median": 1.0}]


def test_a_rank_is_compared_with_the_ranks_of_its_own_stage() -> None:
    busy = [1.0, 1.0, 3.0, 3.0]  # the plan gives the second stage more work
    assert summarise_ranks(rank_table(busy_seconds=busy), 2)["outliers"] == []
    busy = [1.0, 1.0, 1.0, 3.0, 3.0, 9.0]
    assert [each["rank"] for each in summarise_ranks(rank_table(busy_seconds=busy), 3)["outliers"]] == [5]

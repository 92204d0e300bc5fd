"""Nodes with fast links between them are neighbours; links that differ by noise change nothing."""

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.core import Seconds
from trimaran.launch import group_nodes, list_groups, order_nodes, tournament
from trimaran.runs import LinkSpeed, MeasuredLinks, RunDirectory, read_measured_links, write_measured_links

NOISE = 1.15  # a measurement is off by this factor at most


def planted(sizes: list[int], levels: list[int], seed: int) -> tuple[dict[frozenset[str], float], dict[str, int]]:
    """Return the times of all pairs, and the group of each node, whose name says nothing about it.

    `levels` has for each group the pair of groups that it belongs to: links are four times slower between groups, and
    four times slower again between pairs of groups.
    """
    chance = random.Random(seed)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    names = [f"n{index:02d}" for index in range(len(numbers))]
    chance.shuffle(names)
    group = dict(zip(names, numbers, strict=True))
    times = {}
    for one, other in itertools.combinations(names, 2):
        same = group[one] == group[other]
        near = levels[group[one]] == levels[group[other]]
        base = 1e-3 if same else 4e-3 if near else 16e-3
        times[frozenset((one, other))] = base * chance.uniform(1 / NOISE, NOISE)
    return times, group


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.booleans(), st.integers(0, 10**6))
def test_planted_groups_are_neighbours_in_the_order(sizes: list[int], is_deep: bool, seed: int) -> None:
    levels = [number // 2 if is_deep else 0 for number in range(len(sizes))]
    times, group = planted(sizes, levels, seed)
    groups = group_nodes([*group], times)
    order = order_nodes(groups)
    assert sorted(order) == sorted(group)
    runs = [number for number, _ in itertools.groupby(order, key=group.__getitem__)]
    assert len(runs) == len(sizes), "each group is in one piece"
    pairs = [level for level, _ in itertools.groupby(order, key=lambda name: levels[group[name]])]
    assert len(pairs) == len(set(levels)), "and each pair of groups"
    assert order_nodes(groups, first="n00")[0] == "n00"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_noise_leaves_the_order_of_names(num_nodes: int, seed: int) -> None:
    times, group = planted([num_nodes], [0], seed)
    groups = group_nodes([*group], times)
    assert set(groups.values()) == {()}
    assert order_nodes(groups) == sorted(group)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 4), st.integers(0, 10**6))
def test_the_groups_do_not_depend_on_the_order_of_nodes(size: int, seed: int) -> None:
    times, group = planted([size, size], [0, 0], seed)
    names = [*group]
    assert group_nodes(names, times) == group_nodes(names[::-1], times)
    assert list_groups(group_nodes(names, times)) == sorted(
        tuple(sorted(name for name in names if group[name] == number)) for number in range(2)
    )


def test_a_pair_that_was_interrupted_does_not_hide_the_groups() -> None:
    times, group = planted([3, 3], [0, 0], 0)
    inside = next(pair for pair in times if len({group[name] for name in pair}) == 1)
    times[inside] *= 3
    order = order_nodes(group_nodes([*group], times))
    assert len([*itertools.groupby(order, key=group.__getitem__)]) == 2


def test_pairs_without_a_measurement_make_no_groups() -> None:
    assert order_nodes(group_nodes(["b", "a", "c"], {})) == ["a", "b", "c"]
    known: dict[frozenset[str], float] = {frozenset("ab"): 1e-3, frozenset("ac"): 1e-3}
    assert order_nodes(group_nodes(["c", "b", "a"], known)) == ["a", "b", "c"]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 8, 33])
def test_a_tournament_has_every_pair_once_and_every_node_once_a_round(num_nodes: int) -> None:
    names = [str(number) for number in range(num_nodes)]
    rounds = tournament(names)
    met = [frozenset(pair) for each in rounds for pair in each]
    assert sorted(map(sorted, met)) == sorted(sorted(pair) for pair in itertools.combinations(names, 2))
    assert len(rounds) <= num_nodes
    for each in rounds:
        busy = [name for pair in each for name in pair]
        assert len(busy) == len(set(busy))


def test_measured_links_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_measured_links(run) == MeasuredLinks()
    link = LinkSpeed(round_trip=Seconds(1e-3), bytes_per_second=1e8)
    measured = MeasuredLinks(
        links={frozenset("ab"): link}, groups=(("a", "b"),), order=("a", "b"), seconds=Seconds(1.5)
    )
    write_measured_links(run, measured)
    assert read_measured_links(run) == measured
    assert link.exchange_seconds == pytest.approx(1e-3 + 2**20 / 1e8)


@pytest.mark.parametrize(
    "change",
    [{"links": 3}, {"order": None}, {"links": [{"nodes": ["a", "b"], "round_trip": 0, "bytes_per_second": 0}]}],
    ids=["number", "null", "no-speed"],
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, change: dict[str, object]) -> None:
    run = RunDirectory(tmp_path)
    run.measured_links.write_text(json.dumps({"links": [], "groups": [], "order": [], "seconds": 0} | change))
    assert read_measured_links(run) == MeasuredLinks()
    run.measured_links.write_text("{")
    assert read_measured_links(run) == MeasuredLinks()

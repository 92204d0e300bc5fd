"""`trimaran bench comm` without ranks: sizes, groups, places, bandwidths, outliers, calibration and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimaran.app import (
    CommOptions,
    axis_groups,
    calibrated,
    complete_collectives,
    complete_comm_groups,
    default_groups,
    find_outliers,
    find_places,
    main,
    parse_collectives,
    parse_groups,
    parse_sizes,
    tree_of,
    write_calibration,
)
from trimaran.core import Mesh, UserError
from trimaran.cost import all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.machine import (
    BUS_FACTORS,
    Calibration,
    Cluster,
    Collectives,
    CommCurve,
    CommPair,
    CommPoint,
    CommResult,
    FittedRates,
    LinkFactors,
    machine_name,
    parse_cluster,
    read_comm_result,
)

SIZES = [1024 * 4**power for power in range(8)]


def make_curve(collective: str = "all_reduce", *, ranks: int = 2, hop: float = 1e-3, rate: float = 1e9,
               **fields: Any) -> CommCurve:  # fmt: skip
    """Return a curve whose ring has this latency for each hop, and this bus bandwidth."""
    one = CommPoint(num_bytes=1, seconds=1, median_seconds=1, max_seconds=1, rounds=1)
    curve = CommCurve(group="world", collective=collective, ranks=ranks, nodes=1, groups=1, points=(one,))
    seconds = [curve.num_hops * hop + curve.bus_factor * size / rate for size in SIZES]
    points = tuple(CommPoint(num_bytes=size, seconds=took, median_seconds=took, max_seconds=took, rounds=3)
                   for size, took in zip(SIZES, seconds, strict=True))  # fmt: skip
    return curve.model_copy(update={"points": points, "link": "loopback", **fields})


def make_result(*curves: CommCurve, **fields: Any) -> CommResult:
    given: dict[str, Any] = {"device": "cpu, 2 cores", "backend": "gloo", "dtype": "fp32", "date": "2026-11-17"}
    given |= {"world_size": 2, "num_nodes": 1, **fields}
    return CommResult(curves=curves or (make_curve(),), **given)


def test_sizes_are_lists_or_ranges() -> None:
    assert parse_sizes("1KiB,1MiB,4096") == [1024, 4096, 2**20]
    assert parse_sizes("1KiB..64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("1k..8k*2, 1MB") == [1024, 2048, 4096, 8192, 10**6]
    assert parse_sizes("1.5KiB") == [1536]


@pytest.mark.parametrize("text", ["", "x", "1KiB..", "4MiB..1KiB", "1KiB..1MiB*1", "1KiB*2", "0", "1XiB", "9TiB", "-1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="C010"):
        parse_sizes(text)


def test_collectives_are_named_with_dashes_or_underscores() -> None:
    assert parse_collectives("all-reduce,send_recv,all_reduce") == ["all_reduce", "send_recv"]
    assert parse_collectives("all") == list(BUS_FACTORS)
    with pytest.raises(UserError, match="did you mean 'all_gather'"):
        parse_collectives("allgather")


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert BUS_FACTORS["all_reduce"](4) == 1.5
    assert BUS_FACTORS["all_gather"](4) == BUS_FACTORS["reduce_scatter"](4) == BUS_FACTORS["all_to_all"](4) == 0.75
    assert BUS_FACTORS["broadcast"](4) == BUS_FACTORS["send_recv"](4) == 1.0
    curve = make_curve(ranks=4, hop=0.0, rate=3e9)
    point = curve.points[-1]
    assert curve.bus_bandwidth(point) == pytest.approx(3e9)
    assert curve.algorithm_bandwidth(point) == pytest.approx(2e9)


def test_groups_are_blocks_of_neighbours_or_axes_of_the_plan() -> None:
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    shape: dict[str, Any] = {"world_size": 8, "ranks_per_node": 4, "mesh": mesh}
    groups = {each.name: each for each in parse_groups("world,node,2,tp,pp,dp", **shape)}
    assert groups["world"].ranks == (tuple(range(8)),)
    assert groups["node"].ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups["2"].ranks == groups["tp"].ranks == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups["dp"].ranks == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups["pp"].ranks == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {name: each.nodes for name, each in groups.items()} == {
        "world": 2, "node": 1, "2": 1, "tp": 1, "dp": 1, "pp": 2,
    }  # fmt: skip
    assert default_groups(**shape) == "world,node,pp,dp_shard,tp"


def test_the_ranks_of_an_axis_are_those_of_training() -> None:
    """The trainer's mesh is the product pp x dp_replicate x dp_shard x cp x tp in C order, tp innermost."""
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert axis_groups(mesh, ["tp"])[0] == (0, 1)
    assert axis_groups(mesh, ["cp"])[0] == (0, 2)
    assert axis_groups(mesh, ["dp_shard"])[0] == (0, 4)
    assert axis_groups(mesh, ["dp_replicate"])[0] == (0, 8)
    assert axis_groups(mesh, ["pp"])[0] == (0, 16)


@pytest.mark.parametrize(("text", "word"), [("3", "divisor"), ("1", "divisor"), ("tp", "--recipe"), ("tpp", "tp"),
                                            ("", "no group"), ("world,nodes", "node")])  # fmt: skip
def test_what_is_no_group_is_refused(text: str, word: str) -> None:
    with pytest.raises(UserError, match="C010") as caught:
        parse_groups(text, world_size=4, ranks_per_node=4, mesh=None)
    assert word in caught.value.what + caught.value.fix


def test_ranks_run_here_or_on_nodes_or_under_torchrun() -> None:
    cluster = parse_cluster("2xcpu")
    here = find_places(CommOptions(ranks=4), cluster, {})
    assert (here.first, here.here, here.world_size, here.address) == (0, 4, 4, "")
    second = find_places(CommOptions(ranks=2, nodes=3, node=1, address="a:29400"), cluster, {})
    assert (second.first, second.world_size, second.hosts_store) == (2, 6, False)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h",
                "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    rank = find_places(CommOptions(), cluster, torchrun)
    assert (rank.first, rank.here, rank.per_node, rank.first_device, rank.hosts_store) == (3, 1, 2, 1, False)


def test_slow_ranks_and_slow_pairs_are_named() -> None:
    pairs = [(left, right) for left in range(4) for right in range(left + 1, 4)]

    def outliers(slow: set[tuple[int, int]]) -> list[str]:
        found = [CommPair(ranks=pair, nodes=1, num_bytes=2**20, seconds=4e-3 if pair in slow else 1e-3)
                 for pair in pairs]  # fmt: skip
        return [each.text(["a", "b", "c", "d"]) for each in find_outliers(found)]

    assert outliers(set()) == []
    assert outliers({(1, 2)}) == ["ranks 1 (b) and 2 (c) are 4.0 times slower together than other pairs"]
    assert outliers({(0, 3), (1, 3), (2, 3)}) == [
        "rank 3 (d) is 4.0 times slower with every partner than the other ranks"
    ]


def test_links_between_nodes_are_compared_among_themselves() -> None:
    """A network is slower than a node; that is no outlier."""
    pairs = [CommPair(ranks=(left, right), nodes=1 + (left // 2 != right // 2), num_bytes=2**20,
                      seconds=9e-3 if left // 2 != right // 2 else 1e-3)
             for left in range(4) for right in range(left + 1, 4)]  # fmt: skip
    assert find_outliers(pairs) == []


def test_the_planner_reproduces_what_was_measured_inside_a_node(tmp_path: Path) -> None:
    curves = [make_curve(name, ranks=2, hop=5e-4, rate=7e8) for name in BUS_FACTORS]
    new = calibrated(make_result(*curves), None)
    assert new.collectives is not None
    assert new.collectives.latency_us == pytest.approx(500, rel=0.01)
    assert not new.is_measured  # the device's own rates were not
    cluster = parse_cluster_with(new, "2xcpu", tmp_path)
    ring = ring_of(cluster.levels, 2, 1)
    assert all_gather_seconds(2**20, ring) == pytest.approx(5e-4 + 2**19 / 7e8, rel=0.01)


def test_the_planner_reproduces_what_was_measured_between_nodes(tmp_path: Path) -> None:
    """100 Mbit/s and 20 ms: without the measurement the planner takes the usual Ethernet."""
    curves = [make_curve(name, hop=20e-3, rate=12e6, nodes=2, link="Ethernet") for name in BUS_FACTORS]
    new = calibrated(make_result(*curves, num_nodes=2), None)
    assert new.collectives is None
    assert new.network is not None
    before = ring_of(parse_cluster("2x1xcpu").levels, 2, 1)
    cluster = parse_cluster_with(new, "2x1xcpu", tmp_path)
    ring = ring_of(cluster.levels, 2, 1)
    assert all_gather_seconds(2**22, ring) == pytest.approx(20e-3 + 2**21 / 12e6, rel=0.01)
    assert all_reduce_seconds(2**22, ring) == pytest.approx(2 * (20e-3 + 2**21 / 12e6), rel=0.01)
    assert all_reduce_seconds(2**22, before) < 0.1 * all_reduce_seconds(2**22, ring)
    inside = parse_cluster_with(new, "2xcpu", tmp_path)
    assert inside.levels[0].latency != cluster.levels[-1].latency  # the network is not the link inside a node


def parse_cluster_with(calibration: Calibration, text: str, folder: Path) -> Cluster:
    write_calibration(folder / f"{machine_name(parse_cluster(text))}.json", calibration)
    return parse_cluster(text, calibrations=folder)


def test_earlier_rates_are_kept_and_factors_of_the_measured_link_are_dropped() -> None:
    fitted = FittedRates(links={"loopback": LinkFactors(bandwidth=2.0), "Ethernet": LinkFactors(latency=3.0)})
    earlier = Calibration(fp32_tflops=0.1, collectives=Collectives(devices=2, latency_us=9.0), fitted=fitted)
    new = calibrated(make_result(make_curve("all_gather")), earlier)
    assert new.fp32_tflops == 0.1
    assert new.collectives is not None
    assert new.collectives.latency_us == pytest.approx(1000, rel=0.01)
    assert new.fitted is not None
    assert new.fitted.links.keys() == {"Ethernet"}


def test_a_result_is_shown_compared_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(tree_of(make_result(make_curve(rate=2e9)))))
    slow = make_result(make_curve(rate=1e9), environment={"NCCL_ALGO": "Ring"})
    after.write_text(json.dumps(tree_of(slow)))
    assert read_comm_result(after) == slow
    page = tmp_path / "page.html"
    assert main(["bench", "comm", "--show", str(after), "--against", str(before), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "-50%" in shown
    assert "differs: NCCL_ALGO was not set, is Ring" in shown
    text = page.read_text()
    assert "all-reduce" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert main(["bench", "comm", "--show", str(after), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["curves"][0]["fit"]["bus_gb_per_second"] == pytest.approx(1.0, rel=0.01)
    assert tree["curves"][0]["fit"]["alpha_us"] == pytest.approx(2000, rel=0.01)


def test_wrong_values_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    wrong = {"group": "world", "collective": "all_reduce", "values": 7}
    path.write_text(make_result(wrong=(wrong,)).model_dump_json())
    assert main(["bench", "comm", "--show", str(path)]) == 2
    assert "WRONG: all_reduce of world returned 7 wrong values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--collectives", "all_redduce"], "C010"),
        (["--sizes", "1KiB..x"], "C010"),
        (["--groups", "3", "--ranks", "4"], "C010"),
        (["--ranks", "1"], "C010"),
        (["--ranks", "1000"], "C010"),
        (["--backend", "mpi"], "C010"),
        (["--backend", "nccl"], "C010"),
        (["--dtype", "fp64"], "C010"),
        (["--nodes", "2"], "C010"),
        (["--sizes", "1TiB", "--ranks", "2"], "C010"),
        (["--against", "nowhere.json"], "C011"),
        (["--show", "/dev/null"], "C011"),
        (["--out", "/proc/nowhere/a.json"], "C009"),
        (["--seconds", "0"], "A001"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", "comm", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"{code}: ")


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for text in (
        "",
        "[]",
        "{}",
        '{"curves": 3}',
        "{" * 100_000,
        make_result().model_dump_json().replace("loop", "\\q"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=r"C011"):
            read_comm_result(path)


def test_lists_are_completed_after_the_last_comma() -> None:
    assert complete_collectives("all_reduce,all_g") == ["all_reduce,all_gather"]
    assert complete_comm_groups("world,t") == ["world,tp"]

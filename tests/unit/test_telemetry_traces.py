"""Trace summaries: self times, idle time and exposed communication; and merged traces of several ranks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import new_run
from trimaran.core import UserError
from trimaran.runs import (
    ProfileRequest,
    Trace,
    clock_shifts,
    device_phases,
    find_traces,
    load_trace,
    merge,
    overlap,
    read_request,
    recipe_request,
    request_file,
    self_times,
    summarise,
    total,
    trace_file,
    union,
    withdraw_request,
    write_merged,
    write_request,
)

BASE = 1_790_857_026_000_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(
    name: str, cat: str, start: float, length: float, *, tid: int = 1, pid: int = 100, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args}


def trace_of(events: list[dict[str, Any]], *, rank: int = 0, host: str = "a", **more: Any) -> Trace:
    defaults: dict[str, Any] = {"base_ns": BASE, "world_size": 2, "device": "cuda:0", "steps": (5, 5)}
    return Trace(events=events, rank=rank, host=host, **defaults | more)


def host_phases(*each: tuple[str, float, float]) -> list[tuple[int, str, int, int]]:
    return [(5, phase, BASE + round(start * 1e3), BASE + round(end * 1e3)) for phase, start, end in each]


def gpu_step(*, rank: int = 0, host: str = "a", late: float = 0.0) -> Trace:
    """Return a step of 100 us: gemm 10 to 40, all-reduce 30 to 70, adam 75 to 95; the clock is `late` us behind."""
    events = [
        span("cudaLaunchKernel", "cuda_runtime", 2 + late, 1, correlation=1),
        span("cudaLaunchKernel", "cuda_runtime", 12 + late, 1, correlation=2),
        span("cudaLaunchKernel", "cuda_runtime", 22 + late, 1, correlation=3),
        span("gemm", "kernel", 10 + late, 30, tid=7, pid=0, correlation=1),
        span(NCCL, "kernel", 30 + late, 40, tid=20, pid=0, correlation=2, **{"Group size": 2}),
        span("adam", "kernel", 75 + late, 20, tid=7, pid=0, correlation=3),
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 100, "tid": 1, "ts": 2 + late},
        {"ph": "f", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 10 + late, "bp": "e"},
    ]
    phases = host_phases(
        ("forward", late, 10 + late), ("backward", 10 + late, 20 + late), ("optimizer", 20 + late, 100 + late)
    )
    return trace_of(events, rank=rank, host=host, phases=phases)


def test_idle_is_time_without_kernels_and_exposed_is_communication_without_compute() -> None:
    found = summarise(gpu_step())
    assert found.on_device
    assert found.seconds == pytest.approx(100e-6)
    assert found.idle == pytest.approx(20e-6)  # 0 to 10, 70 to 75, 95 to 100
    assert (found.communication, found.exposed) == (pytest.approx(40e-6), pytest.approx(30e-6))
    assert [(row.name, row.calls) for row in found.rows] == [(NCCL, 1), ("gemm", 1), ("adam", 1)]


def test_operators_are_ranked_by_self_time_and_wrappers_are_not_compute() -> None:
    events = [
        span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 60),
        span("aten::matmul", "cpu_op", 10, 30),
        span("aten::mm", "cpu_op", 12, 25),
        span("gloo:all_reduce", "user_annotation", 35, 20, tid=2),
    ]
    found = summarise(trace_of(events, device="cpu", phases=host_phases(("backward", 0, 100))))
    assert not found.on_device
    assert [(row.name, pytest.approx(row.seconds * 1e6)) for row in found.rows[1:]] == [
        ("aten::mm", 25),
        ("aten::matmul", 5),
    ]
    assert found.rows[0].seconds == pytest.approx(30e-6)  # the wrapper's self time
    assert found.idle == pytest.approx(70e-6)
    assert found.exposed == pytest.approx(15e-6)  # 40 to 55


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=30))
def test_self_times_of_a_thread_add_up_to_the_union_of_its_spans(spans: list[tuple[int, int]]) -> None:
    nested: list[dict[str, Any]] = []
    for start, length in spans:  # keep only nested spans, like a thread's calls
        inside = [e for e in nested if not (start + length <= e["ts"] or e["ts"] + e["dur"] <= start)]
        if all(e["ts"] <= start and start + length <= e["ts"] + e["dur"] for e in inside):
            nested.append(span("x", "cpu_op", start, length))
    in_any = total(union((e["ts"], e["ts"] + e["dur"]) for e in nested))
    assert sum(own for _, own in self_times(nested)) == pytest.approx(in_any)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10))),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10))),
)
def test_overlap_is_the_intersection(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    unions = [union((a, a + b) for a, b in each) for each in (one, other)]
    covered = [{t for a, b in each for t in range(int(a), int(b))} for each in unions]
    assert total(overlap(*unions)) == len(covered[0] & covered[1])


def test_ranks_become_processes_with_their_own_tracks_and_flows() -> None:
    merged = merge([gpu_step(rank=3), gpu_step(rank=0)])
    events = merged["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == {0, 3}
    assert {names[3, e["tid"]] for e in events if e["pid"] == 3 and e.get("cat") == "kernel"} == {
        "GPU 0 stream 7",
        "GPU 0 stream 20",
    }
    flows = {(e["pid"], e["id"]) for e in events if e.get("cat") == "ac2g"}
    assert len(flows) == len({number for _, number in flows}) == 2
    phases = [
        (e["name"], e["args"]["step"], e["ts"], e["dur"]) for e in events if e.get("cat") == "phase" and e["pid"] == 3
    ]
    assert phases[:3] == [("forward", 5, 0.0, 10.0), ("backward", 5, 10.0, 10.0), ("optimizer", 5, 20.0, 80.0)]


def test_kernels_belong_to_the_phase_in_which_the_host_launched_them() -> None:
    assert device_phases(gpu_step()) == [(10, 40, "forward", 5), (40, 70, "backward", 5), (75, 95, "optimizer", 5)]


def test_clock_skew_between_hosts_is_corrected_by_collectives() -> None:
    near, far = gpu_step(rank=0), gpu_step(rank=1, host="b", late=2_000_000.0)
    assert clock_shifts([near, far]) == {"a": 0.0, "b": pytest.approx(-2_000_000.0)}
    ends = {e["pid"]: e["ts"] for e in merge([near, far])["traceEvents"] if e["name"] == NCCL}
    assert ends[0] == pytest.approx(ends[1])


def test_without_a_collective_over_all_ranks_clocks_are_not_corrected() -> None:
    near, far = (gpu_step(rank=rank, host=host, late=rank * 50.0) for rank, host in ((0, "a"), (1, "b")))
    for trace in (near, far):
        for event in trace.events:
            event.get("args", {}).pop("Group size", None)
            if event["name"] == NCCL:
                event["args"]["Group size"] = 1  # not over all ranks
    assert clock_shifts([near, far])["b"] == 0.0


def test_a_merged_trace_can_be_read_back(tmp_path: Path) -> None:
    write_merged(merge([gpu_step()]), tmp_path / "m.trace.json.gz")
    with gzip.open(tmp_path / "m.trace.json.gz", "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 8
    assert [path.name for path in tmp_path.iterdir()] == ["m.trace.json.gz"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"traceEvents": 3}', '{"traceEvents": [], "trimaran": {"steps": []}}']
)
def test_a_damaged_trace_is_a_user_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError, match="D011"):
        load_trace(path)


def test_a_profile_request_is_read_as_written_and_removed_by_its_id(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    asked = ProfileRequest(steps=2, ranks="0,1", memory=True)
    write_request(run, asked)
    assert read_request(run) == asked
    withdraw_request(run, "another")
    assert request_file(run).exists()
    withdraw_request(run, asked.id)
    assert read_request(run) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"steps": 1e9, "ranks": "0", "memory": false, "id": "a"}',
     '{"steps": 3, "ranks": "../x", "memory": false, "id": "a"}', '{"steps": 3, "ranks": "0"}'],
)  # fmt: skip
def test_an_invalid_request_is_ignored(tmp_path: Path, text: str) -> None:
    run = new_run(tmp_path / "run")
    run.profiles.mkdir()
    request_file(run).write_text(text)
    assert read_request(run) is None


def test_the_recipes_step_range_excludes_its_end() -> None:
    asked = recipe_request("10:13", "0,3")
    assert asked is not None
    assert (asked.first, asked.steps, asked.ranks_of(8)) == (10, 3, [0, 3])
    assert recipe_request("", "0") is None


@pytest.mark.parametrize(
    ("step", "every", "expected"),
    [
        (1, 0, (10, 3)), (11, 0, (11, 2)), (13, 0, None), (1, 100, (10, 3)), (12, 100, (12, 1)),
        (13, 100, (110, 3)), (112, 100, (112, 1)), (113, 100, (210, 3)), (1000, 100, (1010, 3)), (13, 4, (14, 3)),
    ],
)  # fmt: skip
def test_a_trace_is_repeated_from_any_step_on(step: int, every: int, expected: tuple[int, int] | None) -> None:
    asked = recipe_request("10:13", "0")
    assert asked is not None
    rest = asked.from_step(step, every=every)
    assert (None if rest is None else (rest.first, rest.steps)) == expected


def test_traces_are_found_by_step_and_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.profiles.mkdir()
    for step, rank in ((10, 1), (10, 0), (3, 0)):
        trace_file(run, step=step, rank=rank).touch()
    (run.profiles / "merged.trace.json.gz").touch()
    assert {step: [*ranks] for step, ranks in find_traces(run).items()} == {3: [0], 10: [0, 1]}

"""`trimaran profile`, its output, and the description of ranks on SIGUSR1."""

import json
import os
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.runs import new_run
from trimaran.app import main, profile_settings, show_profile
from trimaran.core import UserError, dump_recipe, parse_recipe
from trimaran.launch import HANDLED_SIGNALS, Signals, describe_ranks
from trimaran.runs import read_nsys_stats, request_file

GIB = 1 << 30


def shown(answer: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=80, highlight=False, markup=False)
    show_profile(answer, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "settings", [profile_settings("10:13", "0,3"), ["telemetry.profile=10:13", "telemetry.profile_ranks=0,3"]]
)
def test_steps_of_a_profile_are_not_a_base_60_number(settings: list[str]) -> None:
    recipe = parse_recipe("", name="-", overrides=settings)
    assert (recipe.telemetry.profile, recipe.telemetry.profile_ranks) == ("10:13", "0,3")
    assert parse_recipe(dump_recipe(recipe), name="-") == recipe
    assert parse_recipe("telemetry: {profile: 1:59}", name="-").telemetry.profile == "1:59"


@pytest.mark.parametrize("steps", ["3:3", "0:3", "9:2"])
def test_a_profile_without_steps_is_refused(steps: str) -> None:
    with pytest.raises(UserError, match="R013"):
        parse_recipe("", name="-", overrides=profile_settings(steps, ""))


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--profile=101:103"], "telemetry.profile"),
        (["--profile=3:5", "--profile-ranks=7"], "telemetry.profile_ranks"),
        (["--set", "telemetry.profile_every=50"], "telemetry.profile_every"),
        (["--profile=3:9", "--set", "telemetry.profile_every=6"], "telemetry.profile_every"),
    ],
)
def test_steps_and_ranks_that_the_run_does_not_have_are_refused_before_it_starts(
    options: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--set=cluster=2xcpu", *options, f"--run-dir={tmp_path / 'run'}"]
    assert main(command) == 2
    assert f"where: {where}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_finished_run_or_a_missing_rank_cannot_be_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    for options, code in ((["--ranks=2"], "A001"), (["--ranks=x"], "A001"), ([], "D010"), (["--merge"], "D010")):
        assert main(["profile", str(run.path), *options]) == 2
        assert capsys.readouterr().err.startswith(code)
    assert not request_file(run).exists()


STATS = """Processing [rank-0.sqlite] with [nvtx_pushpop_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Range
40.0,4000000000,2,2000000000.0,2000000000.0,1,2,0.0,":step 11"
10.0,1000000000,2,500000000.0,500000000.0,1,2,0.0,":forward"
25.0,2500000000,2,1250000000.0,1250000000.0,1,2,0.0,":backward"
20.0,2000000000,8,250000000.0,250000000.0,1,2,0.0,":all_reduce dp_shard 4096 B"
5.0,500000000,2,250000000.0,250000000.0,1,2,0.0,NCCL:ncclAllReduce
"""


def test_the_ranges_that_nsys_stats_prints_are_shown_by_phase() -> None:
    rows = read_nsys_stats(STATS)
    assert [(each.text, each.calls, each.seconds, each.share) for each in rows if each.is_phase] == [
        ("backward", 2, 2.5, 0.625),
        ("forward", 2, 1.0, 0.25),
    ]
    ranges = [each.as_dict() | {"is_phase": each.is_phase} for each in rows]
    lines = shown({"files": ["a.nsys-rep"], "nsys": [{"rank": 0, "ranges": ranges}]}).splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["a.nsys-rep", "time"]
    assert [line.rstrip().rpartition("  ")[2] for line in lines[2:]] == [
        "backward", "forward", "all_reduce dp_shard 4096 B", "NCCL:ncclAllReduce",
    ]  # fmt: skip
    assert lines[2].split()[:4] == ["2500.00", "ms", "62.5%", "2"]
    assert read_nsys_stats("generating SQLite file failed") == []
    assert "open it in Nsight Systems" in shown({"files": ["a"], "nsys": [{"rank": 0, "ranges": []}]})


def test_a_trace_is_printed_as_a_line_and_a_table() -> None:
    row = {"name": "void at::native::" + 200 * "x", "seconds": 0.0123, "share": 0.41, "calls": 1234}
    trace = {"rank": 3, "steps": [5, 7], "on_device": True, "seconds": 0.03, "idle": 0.003, "communication": 0.006,
             "exposed": 0.0015, "rows": [row]}  # fmt: skip
    text = shown({"files": ["a.json.gz"], "traces": [trace]})
    assert "steps 5 to 7 of rank 3: 0.030 s; device idle 10.0%; communication 20.0%, exposed 5.0%" in text
    assert "12.30 ms  41.0%  1,234  void at::native::x" in text
    assert max(map(len, text.splitlines()[2:])) <= 80


def test_memory_is_printed_by_module_and_by_line() -> None:
    lines = [{"file": "/repo/loss.py", "line": 12, "function": "loss", "bytes": 4 * GIB, "count": 2}]
    memory = {"step": 9, "device": "cuda:0", "allocated": 5 * GIB, "total": 80 * GIB, "lines": [],
              "kinds": {"parameters": GIB}, "peak": {"allocated": 9 * GIB, "from_before": 4 * GIB, "lines": lines},
              "holders": [{"kind": "parameters", "module": "layers.0", "bytes": GIB, "count": 7}],
              "within": {"kinds": {"gradients": GIB}, "holders": []}}  # fmt: skip
    text = shown({"files": ["m.json"], "memory": [memory]})
    assert "step 9 on cuda:0: 5.0 GiB allocated of 80.0 GiB" in text
    assert "peak: 9.0 GiB, of which 4.0 GiB was allocated before the history began" in text
    assert "parameters  layers.0" in text
    assert "loss.py:12" in text


def test_ranks_are_described_in_order_and_an_unresponsive_one_by_its_process(tmp_path: Path) -> None:
    report = {"host": "a", "pid": 11, "step": 7, "section": "step", "entered_seconds_ago": 0.25,
            "memory": {"resident": 3 * GIB, "allocated": 2 * GIB, "reserved": 4 * GIB}}  # fmt: skip
    (tmp_path / "rank-0.json").write_text(json.dumps(report))
    (tmp_path / "rank-0.stacks.txt").write_text("thread MainThread\n  File x\n")
    (tmp_path / "rank-2.json").write_text("{ half")
    (tmp_path / "process-0.json").write_text(json.dumps([{"rank": 2, "pid": 13, "state": "T", "memory": "9 kB"}]))
    text = describe_ranks(tmp_path, range(3))
    assert text.splitlines() == [
        "rank 0 on a, process 11: step 7, step for 0.2 s; 3.0 GiB resident, 2.0 GiB allocated on the device, "
        "4.0 GiB reserved there",
        "thread MainThread",
        "  File x",
        "",
        "rank 1 does not answer (it is not running)",
        "",
        "rank 2 does not answer (process 13, 9 kB: stopped by a signal)",
    ]


def test_sigusr1_is_not_a_stop_request() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    signals = Signals()
    try:
        signals.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (signals.show_requested, signals.stop_requested, signals.kill_requested) == (True, False, False)

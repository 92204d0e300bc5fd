"""F077: memory that grows without bound is found, and memory that only fills a cache is not."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fault.harness import wait_for
from trimaran.core import Plan, Recipe
from trimaran.doctor import Evidence, memory_growth
from trimaran.runs import HostSampler

GIB, MIB = 1 << 30, 1 << 20
LEAKING_RANK = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"trimaran-0", 0, 0, 0)
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x") * (24 << 20))
    print(flush=True)
"""


def found(samples: list[dict[str, Any]] | None = None, steps: list[dict[str, Any]] | None = None) -> list[Any]:
    evidence = Evidence(recipe=Recipe(), plan=Plan(), samples=tuple(samples or ()), steps=tuple(steps or ()))
    return list(memory_growth(evidence))


def samples_of(private: Callable[[int], float], *, count: int = 120, key: str = "private") -> list[dict[str, Any]]:
    """Samples every five seconds of a node with 64 GiB: rank 1 has `private(number)` bytes, rank 0 always 2 GiB."""
    ranks = ({"0": {"private": 2.0 * GIB}, "1": {"private": 2.0 * GIB, key: private(each)}} for each in range(count))
    return [{"time": 5.0 * at, "host": "a", "ram": 64 * GIB, "ranks": each} for at, each in enumerate(ranks)]


def test_a_leak_is_found_with_its_rank_and_the_time_that_is_left() -> None:
    (finding,) = found(samples_of(lambda number: 2 * GIB + 20 * MIB * number))
    assert finding.code == "F077"
    assert finding.culprit == "host memory of rank 1 on a"
    assert finding.evidence["growth"] / finding.evidence["seconds"] == pytest.approx(4 * MIB, rel=0.05)
    assert "grows by 14.1 GiB an hour" in finding.verdict
    assert "full in 4 h 14 min" in finding.verdict


def test_a_leak_of_the_loader_is_told_apart() -> None:
    (finding,) = found(samples_of(lambda number: GIB + 40 * MIB * number, key="loader_private"))
    assert finding.culprit == "host memory of the loader of rank 1 on a"
    assert "data source" in finding.fix


def test_a_leak_below_peaks_that_come_and_go_is_found() -> None:
    assert found(samples_of(lambda number: 2 * GIB + 20 * MIB * number + (3 * GIB if number % 7 == 0 else 0)))


@pytest.mark.parametrize(
    "private",
    [
        lambda number: 2 * GIB,
        lambda number: 2 * GIB + min(number, 60) * 50 * MIB,  # a cache, full in the middle
        lambda number: 2 * GIB + 4 * GIB * (1 - 0.97**number),  # the same, ever slower
        lambda number: 2 * GIB + (number % 20) * 100 * MIB,  # garbage that is collected
        lambda number: 2 * GIB + random.Random(number).random() * GIB,
        lambda number: 2 * GIB + (number > 70) * 4 * GIB,  # a plan that changed
        lambda number: 2 * GIB + 0.5 * MIB * number,  # less than anyone would notice
    ],
    ids=["constant", "cache", "slower", "collected", "noise", "change", "little"],
)
def test_healthy_memory_is_no_finding(private: Callable[[int], float]) -> None:
    assert found(samples_of(private)) == []


def test_growth_in_the_first_minutes_is_no_finding() -> None:
    assert found(samples_of(lambda number: 2 * GIB + 100 * MIB * number, count=20)) == []


def test_tensors_that_pile_up_on_a_gpu_are_found() -> None:
    def steps(allocated: Callable[[int], float]) -> list[dict[str, Any]]:
        memory = ({"allocated": allocated(each), "reserved": 60 * GIB, "total": 140 * GIB} for each in range(200))
        return [{"step": at + 1, "time": float(at), "memory": each} for at, each in enumerate(memory)]

    (finding,) = found(steps=steps(lambda number: 20 * GIB + 50 * MIB * number))
    assert finding.culprit == "memory of the tensors on the device of rank 0"
    assert found(steps=steps(lambda number: 20 * GIB + number % 3 * GIB)) == []


def test_a_process_that_leaks_is_found_in_its_samples(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-S", "-c", LEAKING_RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdin is not None
    assert rank.stdout is not None
    samples: list[dict[str, Any]] = []
    try:
        wait_for(lambda: psutil.Process(rank.pid).name() == "trimaran-0")
        host = HostSampler(tmp_path, supervisor=os.getpid())
        for at in range(32):  # the rule wants minutes: the times are those of a slower leak
            rank.stdin.write(b"leak\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == b"\n"
            samples.append(host.sample() | {"time": 10.0 * at, "ram": 4 * GIB})
    finally:
        rank.kill()
        rank.communicate()
    (finding,) = found(samples)
    assert finding.culprit.startswith("host memory of rank 0 on ")

"""Container limits, read from fake cgroup trees of both versions."""

from pathlib import Path

import psutil
import pytest

from trimaran.machine import count_oom_kills, cpu_quota, free_bytes, free_tasks, total_and_used_bytes, total_bytes

MIB = 1 << 20
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000  # what cgroup v1 shows without a limit


def make_v2(folder: Path, *, limit: str = "max", used: int = 0, cache: int = 0, shmem: int = 0) -> Path:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 1\nfile {cache}\nshmem {shmem}\n")
    return folder


def make_v1(folder: Path, *, limit: int = NO_LIMIT_V1, used: int = 0, cache: int = 0, shmem: int = 0) -> Path:
    write(folder / "memory/memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory/memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory/memory.stat", f"cache 1\ntotal_cache {cache}\ntotal_shmem {shmem}\n")
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_memory_limit_is_the_total_in_both_versions(tmp_path: Path) -> None:
    v2, v1 = (
        make_v2(tmp_path / "v2", limit=str(8 * MIB), used=3 * MIB),
        make_v1(tmp_path / "v1", limit=8 * MIB, used=3 * MIB),
    )
    for cgroup in (v2, v1):
        assert total_bytes(cgroup) == 8 * MIB
        assert total_and_used_bytes(cgroup) == (8 * MIB, 3 * MIB)


def test_the_limit_of_a_job_inside_the_container_counts(tmp_path: Path) -> None:
    make_v2(tmp_path / "v2", limit=str(64 * MIB), used=9 * MIB)
    make_v2(tmp_path / "v2" / "slurm" / "job_7", limit=str(8 * MIB), used=3 * MIB, cache=MIB)
    v1 = make_v1(tmp_path / "v1")
    for name, text in (("limit_in_bytes", 8 * MIB), ("usage_in_bytes", 3 * MIB)):
        write(v1 / "memory/slurm/job_7" / f"memory.{name}", f"{text}\n")
    write(v1 / "memory/slurm/job_7/memory.stat", f"total_cache {MIB}\ntotal_shmem 0\n")
    for version, line in (("v2", "0::/slurm/job_7/step_0"), ("v1", "4:cpu:/x\n3:memory,hugetlb:/slurm/job_7")):
        where = tmp_path / version, tmp_path / f"{version}.txt"
        write(where[1], f"{line}\n")
        assert total_bytes(*where) == 8 * MIB
        assert total_and_used_bytes(*where) == (8 * MIB, 3 * MIB)
        assert free_bytes(*where) == 6 * MIB
    write(tmp_path / "other.txt", "0::/../elsewhere\n")
    assert total_bytes(tmp_path / "v2", tmp_path / "other.txt") == 64 * MIB


def test_used_memory_never_exceeds_the_limit(tmp_path: Path) -> None:
    assert total_and_used_bytes(make_v2(tmp_path, limit=str(MIB), used=2 * MIB)) == (MIB, MIB)


def test_page_cache_is_free_and_shared_memory_is_not(tmp_path: Path) -> None:
    sizes = {"used": 7 * MIB, "cache": 4 * MIB, "shmem": MIB}
    assert free_bytes(make_v2(tmp_path / "v2", limit=str(8 * MIB), **sizes)) == 4 * MIB
    assert free_bytes(make_v1(tmp_path / "v1", limit=8 * MIB, **sizes)) == 4 * MIB


def test_a_full_container_has_no_free_memory(tmp_path: Path) -> None:
    assert free_bytes(make_v1(tmp_path, limit=MIB, used=2 * MIB)) == 0


def test_without_a_limit_the_host_counts(tmp_path: Path) -> None:
    host = psutil.virtual_memory().total
    for cgroup in (make_v2(tmp_path / "v2"), make_v1(tmp_path / "v1"), tmp_path / "nowhere"):
        total, used = total_and_used_bytes(cgroup)
        assert total_bytes(cgroup) == total == host
        assert 0 < used < host
        assert 0 < free_bytes(cgroup) <= host
        assert cpu_quota(cgroup) is None


def test_a_file_that_is_not_a_number_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "garbage")
    write(tmp_path / "cpu.max", "garbage 100000")
    assert total_bytes(tmp_path) == psutil.virtual_memory().total
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [("150000", 1.5), ("-1", None)])
def test_the_cpu_quota_of_cgroup_v1(tmp_path: Path, quota: str, cores: float | None) -> None:
    write(tmp_path / "cpu/cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_the_cpu_quota_of_cgroup_v2(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path / "cpu.max", text)
    assert cpu_quota(tmp_path) == cores


def test_oom_kills_of_both_versions_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "job/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    write(tmp_path / "memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    write(tmp_path / "v2", "0::/job\n")
    write(tmp_path / "v1", "4:memory:/box\n1:cpu:/\n0::/\n")
    assert count_oom_kills(tmp_path, tmp_path / "v2") == 3
    assert count_oom_kills(tmp_path, tmp_path / "v1") == 2
    assert count_oom_kills(tmp_path / "none", tmp_path / "v2") == count_oom_kills(tmp_path, tmp_path / "none") == 0


@pytest.mark.parametrize(("version", "folder"), [("0::/job", "job"), ("7:pids:/job", "pids/job")])
def test_the_processes_that_a_container_may_still_start(tmp_path: Path, version: str, folder: str) -> None:
    write(tmp_path / "membership", f"{version}\n")
    assert free_tasks(tmp_path, tmp_path / "membership") is None
    write(tmp_path / folder / "pids.max", "64\n")
    write(tmp_path / folder / "pids.current", "50\n")
    assert free_tasks(tmp_path, tmp_path / "membership") == 14
    write(tmp_path / folder / "pids.max", "max\n")
    assert free_tasks(tmp_path, tmp_path / "membership") is None

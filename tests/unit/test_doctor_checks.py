"""What each look at a machine says: of a healthy one, and of one with the trouble that the look is for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import GIB, Bytes, Seconds, UserError
from trimaran.doctor.checks import (
    bandwidth,
    clock,
    clocks,
    disk,
    disk_speed,
    ecc,
    environment,
    gpus,
    limits,
    load,
    memory,
    network,
    ports,
    products,
    shared_memory,
    sums,
    topology,
    versions,
)
from trimaran.doctor.checks.versions import known_bad, within
from trimaran.doctor.machine_facts import (
    DiskFacts,
    Facts,
    Gpu,
    HostFacts,
    MachineMeasurements,
    Nic,
    NodeMeasurements,
    Versions,
    Wiring,
    Work,
)
from trimaran.doctor.nvidia_smi import parse_whole
from trimaran.doctor.preflight import CHECKS, examine, refuse_unfit
from trimaran.hardware import parse_cluster

MACHINES = Path(__file__).parent / "machines"
# What an H200 really answered (tests/unit/machines/README.md), and a neighbour like it.
(H200,), DRIVER = parse_whole((MACHINES / "smi-h200.xml").read_text())
WELL = (H200, replace(H200, index=1, uuid="GPU-1", bus="00000000:0B:00.0"))
SICK, _ = parse_whole((MACHINES / "smi-sick.xml").read_text())
HOST = HostFacts(cores=8, memory_free=Bytes(32 * GIB), shm=Bytes(8 * GIB), shm_free=Bytes(8 * GIB), nofile=65536)
DISK = DiskFacts(path=Path("/runs"), free=Bytes(500 * GIB), total=Bytes(900 * GIB), inodes=10**7, bandwidth=1e9)
CARDS = (
    Nic(name="mlx5_0", kind="infiniband", is_up=True, gigabits=400.0),
    Nic(name="mlx5_1", kind="infiniband", is_up=True, gigabits=400.0),
)
CUDA = Versions(torch="2.13.0+cu128", torch_cuda="12.8", nccl="2.28.9", driver=DRIVER, driver_cuda="12.8")
MEASURED = MachineMeasurements(
    products={"GPU 0": 700e12, "GPU 1": 690e12},
    precision="bf16",
    reduce={"ranks": 2, "backend": "nccl", "checked": 10, "wrong": {}, "bytes": 1 << 28, "seconds": 0.001},
    archs=("sm_80", "sm_90"),
    capabilities=("sm_90",),
)
HEALTHY = Facts(
    environment={},
    versions=CUDA,
    gpus=WELL,
    wiring=Wiring(topology=[["X", "NV18"], ["NV18", "X"]], peers=[["X", "OK"], ["OK", "X"]], nics=CARDS),
    host=HOST,
    disk=DISK,
    work=Work(kind="cuda", ranks=2, device_bytes=Bytes(60 * GIB), error=0.1),
    measured=MEASURED,
    cluster=parse_cluster("2xH200"),
)


def changed(facts: Facts, part: str, **changes: Any) -> Facts:
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def test_a_healthy_machine_fails_and_warns_nowhere() -> None:
    assert [(each.code, each.what) for each in examine(HEALTHY) if each.status in ("fail", "warn")] == []
    refuse_unfit(HEALTHY)


def test_every_check_has_a_code_of_its_own() -> None:
    codes = [each.code for each in examine(HEALTHY)]
    assert len(set(codes)) == len(CHECKS)


def test_whatever_is_wrong_has_a_fix() -> None:
    sick = replace(HEALTHY, gpus=SICK, environment={"NCCL_TIMEOUT": "3600", "CUDA_LAUNCH_BLOCKING": "1"})
    wrong = [each for each in examine(sick) if each.status in ("fail", "warn")]
    assert len(wrong) >= 4
    assert all(each.fix for each in wrong)


@pytest.mark.parametrize(
    ("versions_", "status", "said"),
    [
        (Versions(), "fail", "not installed"),
        (replace(CUDA, torch="2.13.0+cpu", torch_cuda=""), "fail", "cannot use the GPUs"),
        (replace(CUDA, torch_cuda="13.0"), "fail", "torch needs CUDA 13"),
        (replace(CUDA, torch_cuda="12.9"), "pass", "CUDA 12.9"),  # within a major version an older driver does
        (replace(CUDA, torch="2.7.1+cu126"), "warn", "older than 2.11"),
        (replace(CUDA, nccl="2.25.1"), "warn", "an abort of NCCL may hang"),
        (replace(CUDA, nccl="2.18.1"), "warn", "corrupted"),
        (replace(CUDA, nccl="2.29.2", arch="aarch64"), "warn", "hang on ARM"),
        (replace(CUDA, nccl="2.29.2", arch="x86_64"), "pass", ""),
        (replace(CUDA, nccl="2.29.7"), "pass", ""),  # goes wrong on several nodes only
    ],
)
def test_versions_that_do_not_fit_are_told(versions_: Versions, status: str, said: str) -> None:
    h100 = tuple(replace(gpu, name="NVIDIA H100 80GB HBM3") for gpu in WELL)  # some go wrong on one kind of GPU only
    found = versions.check(replace(HEALTHY, gpus=h100, versions=versions_))
    assert (found.status, said in found.what) == (status, True), found


def test_a_pair_that_goes_wrong_between_nodes_is_told_there() -> None:
    facts = replace(HEALTHY, versions=replace(CUDA, nccl="2.30.4"), work=Work(kind="cuda", ranks=16, nodes=2))
    assert "NCCL_PXN_DISABLE=1" in versions.check(facts).fix


def test_gpus_that_torch_has_no_kernels_for_are_told() -> None:
    volta = replace(HEALTHY, gpus=(Gpu(index=0, name="Tesla V100-SXM2-32GB"),))
    assert "before Turing" in versions.check(volta).what
    seen = replace(MEASURED, capabilities=("sm_70",))
    assert versions.check(replace(volta, measured=seen)).status == "fail"
    newer = replace(MEASURED, capabilities=("sm_86", "sm_120"), archs=("sm_80", "compute_90"))
    assert versions.check(replace(HEALTHY, measured=newer)).status == "pass"


def test_every_bad_pair_has_its_source() -> None:
    for row in known_bad():
        assert row["source"].startswith("https://")
        assert row["date"].year >= 2025
        assert row["what"]
        assert row["fix"]


@pytest.mark.parametrize(
    ("version", "condition", "holds"),
    [("2.11", ">=2.11.0", True), ("2.10.9", ">=2.11", False), ("2.29.7", ">=2.29.7,<2.30.7", True),
     ("2.30.7", ">=2.29.7,<2.30.7", False), ("", "<9", False), ("2.13.0a0+git", "<3", True)],
)  # fmt: skip
def test_versions_are_compared_by_number(version: str, condition: str, holds: bool) -> None:
    assert within(version, condition) is holds


def test_gpus_in_use_or_to_be_reset_are_told() -> None:
    found = gpus.check(replace(HEALTHY, gpus=SICK))
    assert found.status == "fail"
    assert "GPU 3 asks to be reset" in found.what
    assert "GPU 2: 40.0 GiB of 79.6 GiB are in use" in found.what
    locked = replace(WELL[0], compute_mode="Prohibited")
    assert gpus.check(replace(HEALTHY, gpus=(locked,))).status == "fail"
    mixed = (WELL[0], replace(WELL[1], name="NVIDIA A100"))
    assert "mixes" in gpus.check(replace(HEALTHY, gpus=mixed)).what


def test_gpus_of_another_maker_are_no_failure() -> None:
    assert gpus.check(replace(HEALTHY, gpus=())).status == "warn"
    assert gpus.check(replace(HEALTHY, gpus=(), work=None)).status == "skip"


def test_memory_errors_are_told_by_gpu() -> None:
    found = ecc.check(replace(HEALTHY, gpus=SICK))
    assert found.status == "fail"
    assert found.what.startswith("GPU 1 (GPU-22222222-bbbb) has no spare memory rows")
    assert "GPU 0 (GPU-11111111-aaaa) had 2 uncorrected" in found.what
    assert "waits for a reset" in found.what


def test_what_slows_gpus_down_is_told() -> None:
    found = clocks.check(replace(HEALTHY, gpus=SICK))
    assert found.status == "warn"
    for said in ("GPU 1: it is too hot", "GPU 2: power limit 500 W", "GPU 2: clock held at 1200 MHz", "GPU 2: PCIe x8",
                 "GPU 3: the power supply brakes it"):  # fmt: skip
        assert said in found.what
    assert "nvidia-smi -i 2 -pl 700" in found.fix


def test_missing_links_between_gpus_are_named() -> None:
    four = (*WELL, *WELL)
    ring = [["X" if a == b else "NV18" for a in range(4)] for b in range(4)]
    whole = replace(HEALTHY, gpus=four, wiring=Wiring(topology=ring))
    assert topology.check(whole).status == "pass"
    ring[1][3] = ring[3][1] = "SYS"
    assert "no NVLink between GPU 1 and 3" in topology.check(whole).what
    ring[1][3] = ring[3][1] = "NV16"
    assert topology.check(whole).what.startswith("GPU 1, 3 has 52 NVLinks, the others 54")
    refused = Wiring(topology=[["X", "PHB"], ["PHB", "X"]], peers=[["X", "CNS"], ["CNS", "X"]])
    cards = replace(HEALTHY, wiring=refused, cluster=parse_cluster("2xRTX4090"))
    assert topology.check(cards).what.startswith("no peer access between GPU 0 and 1 (CNS: the chipset does not)")


def test_cards_that_are_down_slow_or_far_are_named() -> None:
    down = (*CARDS, replace(CARDS[0], name="mlx5_2", is_up=False), replace(CARDS[0], name="mlx5_3", gigabits=100.0))
    found = network.check(changed(HEALTHY, "wiring", nics=down))
    assert "mlx5_2 down" in found.what
    assert "mlx5_3 at 100 Gb/s, others at 400" in found.what
    far = changed(HEALTHY, "wiring", to_nics=[["PIX"], ["SYS"]], gpu_numa=(0, 1), own_numa=frozenset({0}))
    assert "GPU 1 reaches every network card across sockets" in network.check(far).what
    assert "GPUs hang on 1" in network.check(far).what


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_TIMEOUT", "1800", "is not a variable of NCCL"),
        ("NCCL_IB_DISABLE", "1", "turns InfiniBand off"),
        ("NCCL_P2P_DISABLE", "1", "NVLink is not used"),
        ("CUDA_LAUNCH_BLOCKING", "1", "wait for every kernel"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "old name of TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_SOCKET_IFNAM", "eth0", "NCCL has no NCCL_SOCKET_IFNAM"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True", "did you mean 'expandable_segments'?"),
        ("OMP_NUM_THREADS", "64", "OMP_NUM_THREADS=64 for 2 ranks on 8 cores"),
        ("NCCL_SOCKET_IFNAME", "eth7", "no interface here begins so"),
        ("CUDA_VISIBLE_DEVICE", "0", "is read by nobody"),
    ],
)
def test_variables_that_hurt_or_do_nothing_are_told(name: str, value: str, said: str) -> None:
    facts = changed(replace(HEALTHY, environment={name: value}), "wiring", interfaces=frozenset({"lo", "eth0"}))
    found = environment.check(facts)
    assert (found.status, said in found.what) == ("warn", True), found


def test_variables_that_do_their_work_are_left_alone() -> None:
    usual = {"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "eth",
             "PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]",
             "NCCL_OFI_PROTOCOL_X": "RDMA", "PATH": "/bin"}  # fmt: skip
    facts = changed(replace(HEALTHY, environment=usual), "wiring", interfaces=frozenset({"lo", "eth0"}))
    assert environment.check(facts).status == "pass"
    on_cpu = replace(HEALTHY, gpus=(), work=None, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert environment.check(on_cpu).status == "pass"


def test_an_interface_that_is_not_there_stops_a_run_of_several_ranks() -> None:
    facts = changed(replace(HEALTHY, environment={"GLOO_SOCKET_IFNAME": "ib0"}), "wiring", interfaces=frozenset({"lo"}))
    with pytest.raises(UserError, match=r"H007: GLOO_SOCKET_IFNAME is ib0[^$]*--no-check"):
        refuse_unfit(facts)
    assert environment.check(replace(facts, work=Work(kind="cuda", ranks=1))).status == "warn"


def test_little_shared_memory_is_told_where_several_gpus_want_it() -> None:
    small = changed(HEALTHY, "host", shm=Bytes(64 << 20), shm_free=Bytes(64 << 20))
    assert "--shm-size" in shared_memory.check(small).fix
    assert shared_memory.check(replace(small, gpus=())).status == "pass"
    assert shared_memory.check(changed(HEALTHY, "host", shm=None)).status == "skip"


def test_low_limits_are_told() -> None:
    assert limits.check(changed(HEALTHY, "host", nofile=256)).status == "warn"
    assert limits.check(changed(HEALTHY, "host", nofile=32)).status == "fail"
    assert "locked" in limits.check(changed(HEALTHY, "host", memlock=65536)).what
    dumps = changed(HEALTHY, "host", core=None, core_pattern="core.%p")
    assert limits.check(dumps).fix == "ulimit -c 0"
    assert limits.check(changed(dumps, "host", core_pattern="|/usr/bin/apport")).status == "pass"


def test_a_disk_too_small_for_the_checkpoints_is_told() -> None:
    assert disk.check(changed(HEALTHY, "work", disk_bytes=Bytes(600 * GIB))).status == "fail"
    assert disk.check(changed(HEALTHY, "disk", trouble="Read-only file system")).status == "fail"
    assert disk.check(changed(HEALTHY, "disk", inodes=12)).status == "warn"
    assert disk.check(changed(replace(HEALTHY, work=None), "disk", free=Bytes(GIB))).status == "warn"


def test_a_disk_too_slow_for_the_checkpoints_is_told() -> None:
    often = changed(HEALTHY, "work", checkpoint_bytes=Bytes(int(100e9)), every=100, interval=Seconds(60.0))
    found = disk_speed.check(often)
    assert found.status == "warn"
    assert "takes 1 min 40 s" in found.what
    assert "--set checkpoint.every=334" in found.fix  # then a save takes half of the time until the next
    assert found.what.endswith("one is due every 1 min 00 s: saves cannot keep up")
    assert disk_speed.check(changed(often, "work", interval=Seconds(3600.0))).status == "pass"
    assert disk_speed.check(changed(replace(HEALTHY, work=None), "disk", bandwidth=1e7)).status == "warn"


@pytest.mark.parametrize(("skew", "status"), [(0.01, "pass"), (-3.0, "warn"), (60.0, "fail")])
def test_clocks_that_are_apart_are_told(skew: float, status: str) -> None:
    fleet = NodeMeasurements(names=("a (node 0)", "b (node 1)"), skews={1: skew})
    assert clock.check(replace(HEALTHY, fleet=fleet)).status == status


def test_a_clock_of_another_century_is_told() -> None:
    assert clock.check(changed(HEALTHY, "host", clock=Seconds(86400.0))).status == "fail"


def test_programs_that_cannot_reach_each_other_are_told() -> None:
    assert ports.check(changed(HEALTHY, "host", loopback="Network is unreachable")).status == "fail"
    assert ports.check(changed(HEALTHY, "work", ports=(9100,))).status == "warn"


def test_a_plan_is_held_against_what_is_free_now() -> None:
    full = tuple(replace(gpu, memory=Bytes(80 * GIB), used=Bytes(40 * GIB)) for gpu in WELL)
    found = memory.check(replace(HEALTHY, gpus=full))
    assert (found.status, found.what) == ("fail", "the plan takes 60.0 GiB a GPU, 40.0 GiB are free")
    near = changed(replace(HEALTHY, gpus=full), "work", device_bytes=Bytes(42 * GIB))
    assert memory.check(near).status == "warn"  # 42 GiB may turn out to be 38
    on_cpu = replace(HEALTHY, work=Work(kind="cpu", ranks=4, device_bytes=Bytes(20 * GIB)))
    assert memory.check(on_cpu).status == "warn"
    refused = replace(HEALTHY, work=Work(refusal="P007: no plan fits", remedy="add devices"))
    assert (memory.check(refused).status, memory.check(refused).fix) == ("fail", "add devices")


def test_a_slow_device_is_named() -> None:
    rates = {"GPU 0": 700e12, "GPU 1": 600e12, "GPU 2": 705e12, "GPU 3": 300e12}
    found = products.check(changed(HEALTHY, "measured", products=rates))
    assert found.status == "fail"
    assert found.what == "GPU 3: 300 TFLOP/s, the others 650"
    dead = changed(HEALTHY, "measured", failures={"GPU 1": "CUDA error: uncorrectable ECC error"})
    assert products.check(dead).what == "no product on GPU 1: CUDA error: uncorrectable ECC error"
    all_slow = changed(HEALTHY, "measured", products=dict.fromkeys(rates, 200e12))
    words = "200 TFLOP/s, 25% of the 795 that others measured at best, and 60% is the least"
    assert (products.check(all_slow).status, products.check(all_slow).what) == ("warn", words)
    one = products.check(changed(HEALTHY, "measured", products={"GPU 0": 679e12}))  # an H200 that is well
    assert (one.status, one.what) == ("pass", "679 TFLOP/s in bf16, 85% of the 795 that others measured at best")


def test_wrong_sums_are_a_failure_with_the_rank() -> None:
    answer = dict(MEASURED.reduce) | {"wrong": {1: 3}}
    found = sums.check(changed(HEALTHY, "measured", reduce=answer))
    assert (found.status, "rank 1 (3 numbers)" in found.what) == ("fail", True)
    broken = {"ranks": 2, "backend": "nccl", "error": "rank 0: unhandled cuda error"}
    assert sums.check(changed(HEALTHY, "measured", reduce=broken)).status == "fail"


@pytest.mark.parametrize(("seconds", "status"), [(0.0007, "pass"), (0.002, "warn"), (0.01, "fail")])
def test_bus_bandwidth_is_held_against_the_links(seconds: float, status: str) -> None:
    answer = dict(MEASURED.reduce) | {"seconds": seconds}
    found = bandwidth.check(changed(HEALTHY, "measured", reduce=answer))
    assert found.status == status, found
    assert found.evidence["bus_bandwidth"] == pytest.approx((1 << 28) / seconds)  # two ranks: 2 * (2 - 1) / 2


def test_a_container_with_fewer_cores_than_it_sees_is_told() -> None:
    assert "2 of the 8 cores" in load.check(changed(HEALTHY, "host", quota=2.0)).what
    assert load.check(changed(HEALTHY, "host", load=30.0)).status == "warn"

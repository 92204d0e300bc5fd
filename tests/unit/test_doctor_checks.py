"""Every machine check, on a healthy machine and on one with the problem it looks for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import GIB, Bytes, Seconds, UserError
from trimaran.machine import (
    CHECKS,
    DiskFacts,
    Facts,
    Gpu,
    HostFacts,
    Interconnect,
    MachineMeasurements,
    Nic,
    NodeMeasurements,
    ProcessLimits,
    RunRequirements,
    Versions,
    known_bad,
    parse_cluster,
    parse_full_query,
    refuse_failed_checks,
    run_checks,
    within,
)
from trimaran.machine.checks import between_nodes, devices, host, software

MACHINES = Path(__file__).parent / "machines"
# Recorded from a real H200 (tests/unit/machines/README.md), and a second GPU like it.
(H200,), DRIVER = parse_full_query((MACHINES / "smi-h200.xml").read_text())
GOOD_GPUS = (H200, replace(H200, index=1, uuid="GPU-1", bus="00000000:0B:00.0"))
FAULTY_GPUS, _ = parse_full_query((MACHINES / "smi-faulty.xml").read_text())
HOST = HostFacts(cores=8, memory_free=Bytes(32 * GIB), shm=Bytes(8 * GIB), shm_free=Bytes(8 * GIB), nofile=65536)
DISK = DiskFacts(path=Path("/runs"), free=Bytes(500 * GIB), total=Bytes(900 * GIB), inodes=10**7, bandwidth=1e9)
CARDS = (
    Nic(name="mlx5_0", kind="infiniband", is_up=True, gigabits=400.0),
    Nic(name="mlx5_1", kind="infiniband", is_up=True, gigabits=400.0),
)
CUDA = Versions(torch="2.13.0+cu128", torch_cuda="12.8", nccl="2.28.9", driver=DRIVER, driver_cuda="12.8")
MEASURED = MachineMeasurements(
    matmul_flops={"GPU 0": 700e12, "GPU 1": 690e12},
    precision="bf16",
    all_reduce={"ranks": 2, "backend": "nccl", "checked": 10, "wrong": {}, "bytes": 1 << 28, "seconds": 0.001},
    archs=("sm_80", "sm_90"),
    capabilities=("sm_90",),
)
HEALTHY = Facts(
    environment={},
    versions=CUDA,
    gpus=GOOD_GPUS,
    interconnect=Interconnect(topology=[["X", "NV18"], ["NV18", "X"]], peers=[["X", "OK"], ["OK", "X"]], nics=CARDS),
    host=HOST,
    disk=DISK,
    requirements=RunRequirements(kind="cuda", ranks=2, device_bytes=Bytes(60 * GIB), error=0.1),
    measured=MEASURED,
    cluster=parse_cluster("2xH200"),
)


def changed(facts: Facts, part: str, **changes: Any) -> Facts:
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def test_a_healthy_machine_passes_every_check() -> None:
    assert [(each.code, each.what) for each in run_checks(HEALTHY) if each.status in ("fail", "warn")] == []
    refuse_failed_checks(HEALTHY)


def test_every_check_has_its_own_code() -> None:
    codes = [each.code for each in run_checks(HEALTHY)]
    assert len(set(codes)) == len(CHECKS)


def test_every_failure_and_warning_has_a_fix() -> None:
    faulty = replace(HEALTHY, gpus=FAULTY_GPUS, environment={"NCCL_TIMEOUT": "3600", "CUDA_LAUNCH_BLOCKING": "1"})
    wrong = [each for each in run_checks(faulty) if each.status in ("fail", "warn")]
    assert len(wrong) >= 4
    assert all(each.fix for each in wrong)


@pytest.mark.parametrize(
    ("versions_", "status", "text"),
    [
        (Versions(), "fail", "not installed"),
        (replace(CUDA, torch="2.13.0+cpu", torch_cuda=""), "fail", "cannot use this machine's GPUs"),
        (replace(CUDA, torch_cuda="13.0"), "fail", "torch needs CUDA 13"),
        (replace(CUDA, torch_cuda="12.9"), "pass", "CUDA 12.9"),  # within a major version an older driver works
        (replace(CUDA, torch="2.7.1+cu126"), "warn", "older than 2.11"),
        (replace(CUDA, nccl="2.25.1"), "warn", "aborting NCCL may hang"),
        (replace(CUDA, nccl="2.18.1"), "warn", "corrupted"),
        (replace(CUDA, nccl="2.29.2", arch="aarch64"), "warn", "hang on ARM"),
        (replace(CUDA, nccl="2.29.2", arch="x86_64"), "pass", ""),
        (replace(CUDA, nccl="2.29.7"), "pass", ""),  # the bug needs several nodes
    ],
)
def test_incompatible_versions_are_reported(versions_: Versions, status: str, text: str) -> None:
    h100 = tuple(replace(gpu, name="NVIDIA H100 80GB HBM3") for gpu in GOOD_GPUS)  # some bugs need one model of GPU
    found = software.installed_versions(replace(HEALTHY, gpus=h100, versions=versions_))
    assert (found.status, text in found.what) == (status, True), found


def test_a_bug_between_nodes_is_reported_for_runs_on_several_nodes() -> None:
    two_nodes = RunRequirements(kind="cuda", ranks=16, nodes=2)
    facts = replace(HEALTHY, versions=replace(CUDA, nccl="2.30.4"), requirements=two_nodes)
    assert "NCCL_PXN_DISABLE=1" in software.installed_versions(facts).fix


def test_gpus_without_torch_kernels_are_reported() -> None:
    volta = replace(HEALTHY, gpus=(Gpu(index=0, name="Tesla V100-SXM2-32GB"),))
    assert "before Turing" in software.installed_versions(volta).what
    measured = replace(MEASURED, capabilities=("sm_70",))
    assert software.installed_versions(replace(volta, measured=measured)).status == "fail"
    newer = replace(MEASURED, capabilities=("sm_86", "sm_120"), archs=("sm_80", "compute_90"))
    assert software.installed_versions(replace(HEALTHY, measured=newer)).status == "pass"


def test_every_known_bug_has_a_source() -> None:
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


def test_gpus_that_are_in_use_or_need_a_reset_are_reported() -> None:
    found = devices.usable_gpus(replace(HEALTHY, gpus=FAULTY_GPUS))
    assert found.status == "fail"
    assert "GPU 3 needs a reset" in found.what
    assert "GPU 2: 40.0 GiB of 79.6 GiB are in use" in found.what
    locked = replace(GOOD_GPUS[0], compute_mode="Prohibited")
    assert devices.usable_gpus(replace(HEALTHY, gpus=(locked,))).status == "fail"
    mixed = (GOOD_GPUS[0], replace(GOOD_GPUS[1], name="NVIDIA A100"))
    assert "mixes" in devices.usable_gpus(replace(HEALTHY, gpus=mixed)).what


def test_missing_nvidia_gpus_are_not_a_failure() -> None:
    assert devices.usable_gpus(replace(HEALTHY, gpus=())).status == "warn"
    assert devices.usable_gpus(replace(HEALTHY, gpus=(), requirements=None)).status == "skip"


def test_memory_errors_are_reported_by_gpu() -> None:
    found = devices.memory_errors(replace(HEALTHY, gpus=FAULTY_GPUS))
    assert found.status == "fail"
    assert found.what.startswith("GPU 1 (GPU-22222222-bbbb) has no spare memory rows")
    assert "GPU 0 (GPU-11111111-aaaa) had 2 uncorrected" in found.what
    assert "needs a reset to remap" in found.what


def test_throttled_and_limited_gpus_are_reported() -> None:
    found = devices.gpu_clocks(replace(HEALTHY, gpus=FAULTY_GPUS))
    assert found.status == "warn"
    for text in (
        "GPU 1: hardware thermal slowdown",
        "GPU 2: power limit 500 W",
        "GPU 2: clock set to 1200 MHz",
        "GPU 2: PCIe x8",
        "GPU 3: power brake slowdown",
    ):
        assert text in found.what
    assert "nvidia-smi -i 2 -pl 700" in found.fix


def test_missing_links_between_gpus_are_named() -> None:
    four = (*GOOD_GPUS, *GOOD_GPUS)
    ring = [["X" if a == b else "NV18" for a in range(4)] for b in range(4)]
    all_linked = replace(HEALTHY, gpus=four, interconnect=Interconnect(topology=ring))
    assert devices.gpu_links(all_linked).status == "pass"
    ring[1][3] = ring[3][1] = "SYS"
    assert "no NVLink between GPU 1 and 3" in devices.gpu_links(all_linked).what
    ring[1][3] = ring[3][1] = "NV16"
    assert devices.gpu_links(all_linked).what.startswith("GPU 1, 3 has 52 NVLinks, the others 54")
    refused = Interconnect(topology=[["X", "PHB"], ["PHB", "X"]], peers=[["X", "CNS"], ["CNS", "X"]])
    cards = replace(HEALTHY, interconnect=refused, cluster=parse_cluster("2xRTX4090"))
    assert devices.gpu_links(cards).what.startswith("no peer access between GPU 0 and 1 (CNS: chipset not supported)")


def test_network_cards_that_are_down_slow_or_far_are_named() -> None:
    down = (*CARDS, replace(CARDS[0], name="mlx5_2", is_up=False), replace(CARDS[0], name="mlx5_3", gigabits=100.0))
    found = between_nodes.network_cards(changed(HEALTHY, "interconnect", nics=down))
    assert "mlx5_2 down" in found.what
    assert "mlx5_3 at 100 Gb/s, others at 400" in found.what
    paths, numa = [["PIX"], ["SYS"]], frozenset({0})
    far = changed(HEALTHY, "interconnect", gpu_nic_paths=paths, gpu_numa=(0, 1), allowed_numa=numa)
    assert "GPU 1 reaches every network card across sockets" in between_nodes.network_cards(far).what
    assert "GPUs are attached to 1" in between_nodes.network_cards(far).what


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NCCL_TIMEOUT", "1800", "is not read by NCCL"),
        ("NCCL_IB_DISABLE", "1", "disables InfiniBand"),
        ("NCCL_P2P_DISABLE", "1", "NVLink is not used"),
        ("CUDA_LAUNCH_BLOCKING", "1", "wait for every kernel"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "old name of TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_SOCKET_IFNAM", "eth0", "NCCL has no variable NCCL_SOCKET_IFNAM"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True", "did you mean 'expandable_segments'?"),
        ("OMP_NUM_THREADS", "64", "OMP_NUM_THREADS=64 for 2 ranks oversubscribes 8 cores"),
        ("OMP_NUM_THREADS", "64,1", "OMP_NUM_THREADS=64,1 for 2 ranks oversubscribes 8 cores"),
        ("NCCL_SOCKET_IFNAME", "eth7", "no interface name starts with that"),
        ("CUDA_VISIBLE_DEVICE", "0", "has no effect"),
    ],
)
def test_harmful_and_useless_variables_are_reported(name: str, value: str, text: str) -> None:
    facts = changed(replace(HEALTHY, environment={name: value}), "interconnect", interfaces=frozenset({"lo", "eth0"}))
    found = software.environment_variables(facts)
    assert (found.status, text in found.what) == ("warn", True), found


def test_useful_variables_are_not_reported() -> None:
    usual = {"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "eth",
             "PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]",
             "NCCL_OFI_PROTOCOL_X": "RDMA", "PATH": "/bin"}  # fmt: skip
    facts = changed(replace(HEALTHY, environment=usual), "interconnect", interfaces=frozenset({"lo", "eth0"}))
    assert software.environment_variables(facts).status == "pass"
    on_cpu = replace(HEALTHY, gpus=(), requirements=None, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert software.environment_variables(on_cpu).status == "pass"


def test_a_missing_interface_refuses_a_run_of_several_ranks() -> None:
    with_variable = replace(HEALTHY, environment={"GLOO_SOCKET_IFNAME": "ib0"})
    facts = changed(with_variable, "interconnect", interfaces=frozenset({"lo"}))
    with pytest.raises(UserError, match=r"H007: GLOO_SOCKET_IFNAME is ib0[^$]*--no-check"):
        refuse_failed_checks(facts)
    one_rank = replace(facts, requirements=RunRequirements(kind="cuda", ranks=1))
    assert software.environment_variables(one_rank).status == "warn"


def test_too_little_shared_memory_is_reported_for_several_gpus() -> None:
    small = changed(HEALTHY, "host", shm=Bytes(64 << 20), shm_free=Bytes(64 << 20))
    assert "--shm-size" in host.shared_memory(small).fix
    assert host.shared_memory(replace(small, gpus=())).status == "pass"
    assert host.shared_memory(changed(HEALTHY, "host", shm=None)).status == "skip"


@pytest.mark.parametrize("value", ["abc", "0", "-2", "2,x"])
def test_threads_that_openmp_would_ignore_refuse_a_run(value: str) -> None:
    result = software.environment_variables(replace(HEALTHY, environment={"OMP_NUM_THREADS": value}))
    assert (result.status, f"OMP_NUM_THREADS is '{value}', which is not" in result.what) == ("fail", True)
    assert software.environment_variables(replace(HEALTHY, environment={"OMP_NUM_THREADS": ""})).status == "pass"


def test_low_limits_are_reported() -> None:
    assert host.process_limits(changed(HEALTHY, "host", nofile=256)).status == "warn"
    assert host.process_limits(changed(HEALTHY, "host", nofile=32)).status == "fail"
    few = changed(HEALTHY, "host", nofile=100)
    assert host.process_limits(replace(few, requirements=RunRequirements(ranks=2))).status == "warn"
    refused = host.process_limits(replace(few, requirements=RunRequirements(ranks=8)))
    assert refused.status == "fail"
    assert refused.what == "only 100 files may be open at once, and a rank of 8 opens at least 124"
    for limit, least in (("processes", 46), ("address_bytes", 2 << 30), ("file_bytes", 1 << 20)):
        two = replace(HEALTHY, requirements=RunRequirements(ranks=2, nodes=2))
        assert host.process_limits(replace(two, limits=ProcessLimits(**{limit: least}))).status == "warn"
        assert host.process_limits(replace(two, limits=ProcessLimits(**{limit: least // 2}))).status == "fail"
    assert "locked" in host.process_limits(changed(HEALTHY, "host", memlock=65536)).what
    dumps = changed(HEALTHY, "host", core=None, core_pattern="core.%p")
    assert host.process_limits(dumps).fix == "ulimit -c 0"
    assert host.process_limits(changed(dumps, "host", core_pattern="|/usr/bin/apport")).status == "pass"


def test_a_disk_too_small_for_the_checkpoints_is_reported() -> None:
    assert host.disk_space(changed(HEALTHY, "requirements", disk_bytes=Bytes(600 * GIB))).status == "fail"
    assert host.disk_space(changed(HEALTHY, "disk", write_error="Read-only file system")).status == "fail"
    assert host.disk_space(changed(HEALTHY, "disk", inodes=12)).status == "warn"
    assert host.disk_space(changed(replace(HEALTHY, requirements=None), "disk", free=Bytes(GIB))).status == "warn"


def test_a_disk_too_slow_for_the_checkpoints_is_reported() -> None:
    often = changed(HEALTHY, "requirements", checkpoint_bytes=Bytes(int(100e9)), every=100, interval=Seconds(60.0))
    found = host.disk_speed(often)
    assert found.status == "warn"
    assert "takes 1 min 40 s" in found.what
    assert "--set checkpoint.every=334" in found.fix  # then a save takes half of the time between two
    assert found.what.endswith("one is due every 1 min 00 s: saves cannot keep up")
    assert host.disk_speed(changed(often, "requirements", interval=Seconds(3600.0))).status == "pass"
    assert host.disk_speed(changed(replace(HEALTHY, requirements=None), "disk", bandwidth=1e7)).status == "warn"


@pytest.mark.parametrize(("skew", "status"), [(0.01, "pass"), (-3.0, "warn"), (60.0, "fail")])
def test_clock_skew_between_nodes_is_reported(skew: float, status: str) -> None:
    node_measurements = NodeMeasurements(names=("a (node 0)", "b (node 1)"), skews={1: skew})
    assert between_nodes.node_clocks(replace(HEALTHY, node_measurements=node_measurements)).status == status


def test_an_implausible_date_is_reported() -> None:
    assert between_nodes.node_clocks(changed(HEALTHY, "host", clock=Seconds(86400.0))).status == "fail"


def test_a_broken_loopback_and_taken_ports_are_reported() -> None:
    assert host.ports(changed(HEALTHY, "host", loopback="Network is unreachable")).status == "fail"
    assert host.ports(changed(HEALTHY, "requirements", ports=(9100,))).status == "warn"


def test_a_plan_is_compared_with_free_memory() -> None:
    full = tuple(replace(gpu, memory=Bytes(80 * GIB), used=Bytes(40 * GIB)) for gpu in GOOD_GPUS)
    found = host.plan_memory(replace(HEALTHY, gpus=full))
    assert (found.status, found.what) == ("fail", "the plan needs 60.0 GiB per GPU, 40.0 GiB are free")
    near = changed(replace(HEALTHY, gpus=full), "requirements", device_bytes=Bytes(42 * GIB))
    assert host.plan_memory(near).status == "warn"  # 42 GiB may turn out to be 38
    on_cpu = replace(HEALTHY, requirements=RunRequirements(kind="cpu", ranks=4, device_bytes=Bytes(20 * GIB)))
    assert host.plan_memory(on_cpu).status == "warn"
    refused = replace(HEALTHY, requirements=RunRequirements(refusal="P007: no plan fits", remedy="add devices"))
    assert (host.plan_memory(refused).status, host.plan_memory(refused).fix) == ("fail", "add devices")


def test_a_slow_device_is_named() -> None:
    rates = {"GPU 0": 700e12, "GPU 1": 600e12, "GPU 2": 705e12, "GPU 3": 300e12}
    found = devices.matmul_speed(changed(HEALTHY, "measured", matmul_flops=rates))
    assert found.status == "fail"
    assert found.what == "GPU 3: 300 TFLOP/s, the others 650"
    dead = changed(HEALTHY, "measured", failures={"GPU 1": "CUDA error: uncorrectable ECC error"})
    assert devices.matmul_speed(dead).what == "matmul failed on GPU 1: CUDA error: uncorrectable ECC error"
    all_slow = changed(HEALTHY, "measured", matmul_flops=dict.fromkeys(rates, 200e12))
    what = "200 TFLOP/s, 25% of 795 (best published result); expected at least 60%"
    assert (devices.matmul_speed(all_slow).status, devices.matmul_speed(all_slow).what) == ("warn", what)
    one = devices.matmul_speed(changed(HEALTHY, "measured", matmul_flops={"GPU 0": 679e12}))  # a healthy H200
    assert (one.status, one.what) == ("pass", "679 TFLOP/s in bf16, 85% of 795 (best published result)")


def test_wrong_all_reduce_results_fail_and_name_the_rank() -> None:
    answer = dict(MEASURED.all_reduce) | {"wrong": {1: 3}}
    found = devices.all_reduce_result(changed(HEALTHY, "measured", all_reduce=answer))
    assert (found.status, "rank 1 (3 values)" in found.what) == ("fail", True)
    broken = {"ranks": 2, "backend": "nccl", "error": "rank 0: unhandled cuda error"}
    assert devices.all_reduce_result(changed(HEALTHY, "measured", all_reduce=broken)).status == "fail"


@pytest.mark.parametrize(("seconds", "status"), [(0.0007, "pass"), (0.002, "warn"), (0.01, "fail")])
def test_bus_bandwidth_is_compared_with_the_links(seconds: float, status: str) -> None:
    answer = dict(MEASURED.all_reduce) | {"seconds": seconds}
    found = devices.all_reduce_speed(changed(HEALTHY, "measured", all_reduce=answer))
    assert found.status == status, found
    assert found.evidence["bus_bandwidth"] == pytest.approx((1 << 28) / seconds)  # two ranks: 2 * (2 - 1) / 2


def test_a_cpu_quota_and_a_high_load_are_reported() -> None:
    assert "2 of the 8 cores" in host.cpu_cores(changed(HEALTHY, "host", quota=2.0)).what
    assert host.cpu_cores(changed(HEALTHY, "host", load=30.0)).status == "warn"

"""Checks of GPUs and the links between them: as the driver reports them, and as measured."""

from collections import Counter
from statistics import median

from trimaran.core import show_bytes
from trimaran.machine.checks.machine_facts import CheckInfo, CheckResult, Facts, Problem
from trimaran.machine.cluster import Cluster
from trimaran.machine.gpus import Matrix

MAX_USED_FRACTION = 0.05  # of a GPU's memory; more means that another program runs there, a desktop takes less


def usable_gpus(facts: Facts) -> CheckResult:
    """List the GPUs, and what would keep a run from using them."""
    info = CheckInfo("H002", "GPUs")
    gpus, requirements = facts.gpus, facts.requirements
    if not gpus:
        if requirements and requirements.needs_gpus:
            # Not a failure: GPUs of other vendors have other tools, and the launcher counts devices itself.
            return info.warn(f"the run needs {requirements.ranks} GPUs, but NVIDIA's driver reports none",
                             "see `nvidia-smi`; without GPUs: --set cluster=auto")  # fmt: skip
        return info.skipped("no NVIDIA GPU found: ranks run on CPU cores")
    problems: list[Problem] = []
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        if gpu.memory and gpu.used > MAX_USED_FRACTION * gpu.memory:
            problems.append(Problem(f"{name}: {show_bytes(gpu.used)} of {show_bytes(gpu.memory)} are in use",
                                    "`nvidia-smi` lists the processes; or choose other GPUs with "
                                    "CUDA_VISIBLE_DEVICES"))  # fmt: skip
        if gpu.compute_mode.startswith("Prohibited"):
            fix = f"nvidia-smi -i {gpu.index} -c DEFAULT"
            problems.append(Problem(f"{name}: compute mode is Prohibited", fix, is_fatal=True))
        if gpu.mig == "Enabled":
            problems.append(Problem(f"{name} is split into MIG slices, which have no peer access",
                                    f"nvidia-smi -i {gpu.index} -mig 0, or use one slice per run"))  # fmt: skip
        if gpu.reset_required:
            problems.append(Problem(f"{name} needs a reset", f"nvidia-smi -i {gpu.index} -r", is_fatal=True))
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        problems.append(Problem(f"the node mixes {' and '.join(names)}", "choose equal ones with CUDA_VISIBLE_DEVICES"))
    healthy = f"{len(gpus)} x {names[0]}, {show_bytes(min(gpu.memory for gpu in gpus))} each, none in use"
    return info.worst(
        problems, healthy, gpus=[{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus]
    )


def memory_errors(facts: Facts) -> CheckResult:
    """List the GPUs with memory errors. A GPU without spare rows has to be replaced."""
    info = CheckInfo("H003", "ECC errors")
    gpus = [(gpu, gpu.ecc) for gpu in facts.gpus if gpu.ecc is not None]
    if not gpus:
        return info.skipped("the driver reports no ECC state" if facts.gpus else "no NVIDIA GPU found")
    problems: list[Problem] = []
    for gpu, ecc in gpus:
        name = f"GPU {gpu.index} ({gpu.uuid or gpu.name})"
        if ecc.spare_rows_exhausted:
            problems.append(Problem(f"{name} has no spare memory rows left", "have the GPU replaced", is_fatal=True))
        if ecc.reset_pending:
            fix = f"nvidia-smi -i {gpu.index} -r"
            problems.append(Problem(f"{name} needs a reset to remap a bad memory row", fix))
        if ecc.uncorrected:
            fix = "reset it; if errors return, run `dcgmi diag -r 3` and have it replaced"
            problems.append(Problem(f"{name} had {ecc.uncorrected} uncorrected memory errors", fix))
    if len({ecc.enabled for _, ecc in gpus}) > 1:
        off = [str(gpu.index) for gpu, ecc in gpus if ecc.enabled is False]
        problems.append(Problem(f"ECC is off on GPU {', '.join(off)} and on for the others",
                                f"nvidia-smi -i {','.join(off)} -e 1, then reboot"))  # fmt: skip
    return info.worst(problems, f"no uncorrected errors on {len(gpus)} GPUs since the driver was loaded")


MIN_FRACTION_OF_DEFAULT = 0.95  # below this, someone lowered the limit on purpose
# Throttle reasons of the driver that point to a fault. Power capping under load is normal and not listed.
THROTTLE_TEXTS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake slowdown (power supply)",
}


def gpu_clocks(facts: Facts) -> CheckResult:
    """List the GPUs that are throttled, limited below their default, or on a narrow PCIe link."""
    info = CheckInfo("H004", "clocks and power")
    clocks_by_gpu = {gpu.index: gpu.clocks for gpu in facts.gpus if gpu.clocks}
    if not clocks_by_gpu:
        return info.skipped("--quick does not read clocks" if facts.gpus else "no NVIDIA GPU found")
    problems = []
    for index, clocks in clocks_by_gpu.items():
        fix = "fix cooling or power supply; see `nvidia-smi -q -d PERFORMANCE`"
        reasons = [text for reason, text in THROTTLE_TEXTS.items() if reason in clocks.throttle_reasons]
        problems += [Problem(f"GPU {index}: {text}", fix) for text in reasons]
        if _is_lowered(clocks.power_limit, clocks.default_power_limit):
            problems.append(Problem(f"GPU {index}: power limit {clocks.power_limit:.0f} W, default "
                                    f"{clocks.default_power_limit:.0f} W",
                                    f"nvidia-smi -i {index} -pl {clocks.default_power_limit:.0f}"))  # fmt: skip
        if _is_lowered(clocks.clock, clocks.default_clock):
            what = f"GPU {index}: clock set to {clocks.clock:.0f} MHz, default {clocks.default_clock:.0f} MHz"
            problems.append(Problem(what, f"nvidia-smi -i {index} -rac"))
        if _is_lowered(clocks.pcie_width, clocks.max_pcie_width):
            what = f"GPU {index}: PCIe x{clocks.pcie_width} of x{clocks.max_pcie_width}"
            problems.append(Problem(what, "reseat the card, and check the riser and the slot"))
    return info.worst(problems, f"{len(clocks_by_gpu)} GPUs at their default limits, none throttled")


def _is_lowered(value: float | None, default: float | None) -> bool:
    return value is not None and default is not None and value < MIN_FRACTION_OF_DEFAULT * default


# What `nvidia-smi topo -p2p` prints for a pair without peer access.
P2P_REFUSALS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
MAX_NAMED_PAIRS = 4  # the rest are counted


def gpu_links(facts: Facts) -> CheckResult:
    """List the pairs of GPUs without a link that the others have."""
    info = CheckInfo("H005", "NVLink and P2P")
    if len(facts.gpus) < 2:
        return info.skipped("fewer than two GPUs here")
    interconnect = facts.interconnect
    if interconnect is None or not (interconnect.topology or interconnect.peers):
        return info.skipped("--quick does not read links" if interconnect is None else "the driver reports no topology")
    # GPUs bridged in pairs are fine. A board with all-to-all NVLink must have it everywhere, with equal lane counts.
    pairs = _pairs(interconnect.topology)
    lanes = [sum(int(kind[2:]) for kind in row if kind.startswith("NV")) for row in interconnect.topology]
    is_board = facts.cluster is not None and facts.cluster.device.link_bandwidth > facts.cluster.device.pcie_bandwidth
    found: list[Problem] = []
    without = [pair for pair, kind in pairs.items() if not kind.startswith("NV")]
    if without and (is_board or len(without) < len(pairs) / 2):
        found.append(Problem(f"no NVLink between {_named(without)}",
                             "`nvidia-smi nvlink -s` shows dead links; is the fabric manager running?"))  # fmt: skip
    if lanes and max(lanes) and min(lanes) < max(lanes) and not without:
        weak = [str(gpu) for gpu, count in enumerate(lanes) if count < max(lanes)]
        found.append(Problem(f"GPU {', '.join(weak)} has {min(lanes)} NVLinks, the others {max(lanes)}",
                             "a link is down: reset the GPU, then have the board inspected"))  # fmt: skip
    refused = {pair: answer for pair, answer in _pairs(interconnect.peers).items() if answer in P2P_REFUSALS}
    if refused:
        why = ", ".join(f"{answer}: {P2P_REFUSALS[answer]}" for answer in sorted(set(refused.values())))
        found.append(Problem(f"no peer access between {_named(list(refused))} ({why}): NCCL copies through host memory "
                             "there", "normal for GeForce; on servers disable ACS and the IOMMU in the "
                             "BIOS"))  # fmt: skip
    kinds = Counter(kind for row in interconnect.topology for kind in row if kind != "X")
    links = ", ".join(f"{kind} x {count // 2}" for kind, count in kinds.most_common())
    return info.worst(found, f"{len(interconnect.topology)} GPUs, {links}", ways=dict(kinds))


def _pairs(matrix: Matrix) -> dict[tuple[int, int], str]:
    return {(a, b): matrix[a][b] for a in range(len(matrix)) for b in range(a + 1, len(matrix))}


def _named(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"GPU {a} and {b}" for a, b in pairs[:MAX_NAMED_PAIRS])
    return shown if len(pairs) <= MAX_NAMED_PAIRS else f"{shown} and {len(pairs) - MAX_NAMED_PAIRS} more pairs"


# Lowest accepted fractions of this machine's calibration, of the catalogue's best matmul, and of the median neighbour.
# A healthy H200 reaches 0.85 of the catalogue in the second we give it; device models with few measurements vary more.
MIN_FRACTION_OF_CALIBRATION, MIN_FRACTION_OF_CATALOGUE, MIN_FRACTION_OF_NEIGHBOURS = 0.7, 0.6, 0.9
FAIL_FRACTION_OF_NEIGHBOURS = 0.5  # such a device delays all others at every step


def matmul_speed(facts: Facts) -> CheckResult:
    """List the devices whose matmuls are slow."""
    info = CheckInfo("H015", "matmul speed")
    measured = facts.measured
    if measured is None or measured.missing:
        return info.skipped(measured.missing if measured else "--quick measures nothing")
    if measured.failures:
        what = "; ".join(f"{name}: {error}" for name, error in measured.failures.items())
        return info.fail(f"matmul failed on {what}", "see `nvidia-smi`, and exclude it with CUDA_VISIBLE_DEVICES")
    rates = measured.matmul_flops
    middle, slowest = median(rates.values()), min(rates, key=lambda name: rates[name])
    fix = "check its clocks and temperature under load, or exclude it with CUDA_VISIBLE_DEVICES"
    problems = [
        Problem(f"{name}: {rate / 1e12:.3g} TFLOP/s, the others {middle / 1e12:.3g}", fix,
                rate < FAIL_FRACTION_OF_NEIGHBOURS * middle)
        for name, rate in rates.items()
        if rate < MIN_FRACTION_OF_NEIGHBOURS * middle
    ]  # fmt: skip
    expected, min_fraction, source = _expected_flops(facts)
    if expected and middle < min_fraction * expected:
        what = f"{middle / 1e12:.3g} TFLOP/s, {_compared(middle, expected, source)}"
        fix = "check for other programs on the device, then its clocks"
        problems.append(Problem(f"{what}; expected at least {min_fraction:.0%}", fix))
    compared = f", {_compared(rates[slowest], expected, source)}" if expected else ""
    each = f" on each of {len(rates)} devices" if len(rates) > 1 else ""
    healthy = f"{rates[slowest] / 1e12:.3g} TFLOP/s in {measured.precision}{each}{compared}"
    return info.worst(problems, healthy, rates=dict(rates), expected=expected)


def _expected_flops(facts: Facts) -> tuple[float, float, str]:
    """Return the expected rate of a device, the lowest accepted fraction of it, and its source; zeros if unknown."""
    cluster, measured = facts.cluster, facts.measured
    if cluster is None or measured is None:
        return 0.0, 0.0, ""
    device = cluster.device
    if measured.precision in device.reached:
        ranks = cluster.devices_per_node if device.traits.shares_cores else 1  # the ranks of a CPU share its cores
        rate = device.reached[measured.precision] * ranks
        return rate, MIN_FRACTION_OF_CALIBRATION, "this machine's calibration"
    if not device.traits.has_data_sheet or "guess" in device.note:
        return 0.0, 0.0, ""
    return device.achievable_flops(measured.precision), MIN_FRACTION_OF_CATALOGUE, "best published result"


def _compared(rate: float, expected: float, source: str) -> str:
    return f"{rate / expected:.0%} of {expected / 1e12:.3g} ({source})"


def all_reduce_result(facts: Facts) -> CheckResult:
    """Report whether an all-reduce over all ranks of this machine was bitwise correct."""
    info = CheckInfo("H016", "all-reduce result")
    measured = facts.measured
    if measured is None or measured.missing:
        return info.skipped(measured.missing if measured else "--quick measures nothing")
    if not measured.all_reduce:
        return info.skipped("only one device, so there is no all-reduce")
    answer = measured.all_reduce
    if error := answer.get("error"):
        return info.fail(f"the all-reduce between ranks of this machine failed: {error}",
                         "read the backend's messages above; NCCL_DEBUG=WARN prints more")  # fmt: skip
    ranks, backend = answer["ranks"], answer["backend"]
    if wrong := answer["wrong"]:
        where = ", ".join(f"rank {rank} ({count:,} values)" for rank, count in sorted(wrong.items()))
        return info.fail(f"the {backend} all-reduce over {ranks} ranks gave wrong results on {where}",
                         "do not train here: run `dcgmi diag -r 3`; try NCCL_P2P_DISABLE=1 to find the faulty link",
                         wrong=dict(wrong))  # fmt: skip
    return info.passed(f"all {answer['checked']:,} values over {ranks} {backend} ranks are bitwise correct")


# Fractions of the expected bandwidth. A ring reaches 0.85 of what the catalogue says a link has.
MIN_FRACTION_OF_CALIBRATION, MIN_FRACTION_OF_LINK, FAIL_FRACTION = 0.7, 0.5, 0.2


def all_reduce_speed(facts: Facts) -> CheckResult:
    """Compare the bus bandwidth between the ranks of this machine with the expected one."""
    info = CheckInfo("H017", "all-reduce speed")
    measured = facts.measured
    if measured is None or measured.missing:
        return info.skipped(measured.missing if measured else "--quick measures nothing")
    answer = measured.all_reduce
    if "seconds" not in answer:
        return info.skipped("the all-reduce did not finish" if answer else "only one device, so there is no all-reduce")
    rate = 2 * (answer["ranks"] - 1) / answer["ranks"] * answer["bytes"] / answer["seconds"]  # over each link
    what = f"{rate / 1e9:.3g} GB/s bus bandwidth over {answer['ranks']} {answer['backend']} ranks"
    expected, min_fraction, source = _expected_bandwidth(facts.cluster, answer["ranks"])
    evidence = {"bus_bandwidth": rate, "expected": expected}
    if not expected:
        return info.passed(f"{what}; run `trimaran bench calibrate` to have a value to compare with", **evidence)
    what = f"{what}, {source} {expected / 1e9:.3g} GB/s"
    fix = "check that NVLink is up (`nvidia-smi nvlink -s`), P2P is allowed and no other program uses the links"
    if answer["backend"] == "gloo":
        return info.passed(what, **evidence) if rate >= min_fraction * expected else info.warn(
            what, "check with `top` whether another program uses this machine", **evidence)  # fmt: skip
    if rate < FAIL_FRACTION * expected:
        return info.fail(what, fix, **evidence)
    return info.passed(what, **evidence) if rate >= min_fraction * expected else info.warn(what, fix, **evidence)


def _expected_bandwidth(cluster: Cluster | None, ranks: int) -> tuple[float, float, str]:
    """Return the bandwidth between this many ranks, the lowest accepted fraction, and its source; zeros if unknown."""
    if cluster is None:
        return 0.0, 0.0, ""
    link = next((each for each in cluster.levels if each.devices >= ranks), cluster.levels[-1])
    if "all_reduce" in link.reached:
        return link.reached["all_reduce"], MIN_FRACTION_OF_CALIBRATION, "calibration measured"
    if not cluster.device.traits.has_data_sheet:
        return 0.0, 0.0, ""
    return link.bandwidth, MIN_FRACTION_OF_LINK, f"{link.name} has"

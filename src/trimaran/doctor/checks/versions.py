"""H001: torch, CUDA, driver and NCCL are compatible, and no installed combination has a known bug."""

import operator
import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, Versions, version_of

INFO = CheckInfo("H001", "versions")
OLDEST_TORCH = "2.11"
COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq, ">": operator.gt, "<=": operator.le}
CONDITION = re.compile(r"(>=|<=|==|<|>)([\d.]+)")


def check(facts: Facts) -> CheckResult:
    """Report whether torch can use this driver, and whether an installed combination has a known bug."""
    versions = facts.versions
    if not versions.torch:
        return INFO.fail("torch is not installed", "pip install torch, see https://pytorch.org/get-started")
    bugs = [_known_bug(row) for row in known_bad() if applies(row, facts)]
    return INFO.worst([*_too_old(versions), *_unusable(facts), *bugs], describe(versions), **dict(_installed(versions)))


def describe(versions: Versions) -> str:
    names = {"torch": "torch", "torch_cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    return ", ".join(f"{names[name]} {value}" for name, value in _installed(versions) if name in names)


def applies(row: dict[str, Any], facts: Facts) -> bool:
    """Whether every condition of `row` holds on this machine; an unknown version satisfies no condition."""
    versions, nics = facts.versions, facts.interconnect.nics if facts.interconnect else ()
    have = {"torch": versions.torch, "cuda": versions.torch_cuda, "nccl": versions.nccl, "driver": versions.driver}
    ranges = all(within(have[name], row[name]) for name in have if name in row)
    gpu = "gpu" not in row or any(model in each.name for model in row["gpu"] for each in facts.gpus)
    arch = "arch" not in row or versions.arch in row["arch"]
    nodes = (facts.requirements.nodes if facts.requirements else 1) >= row.get("nodes", 1)
    infiniband = not row.get("infiniband") or any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    return ranges and gpu and arch and nodes and infiniband


def within(version: str, condition: str) -> bool:
    """Whether `version` is in a range such as `>=2.29.7,<2.30.7`; an unknown version is in no range."""
    have = version_of(version)
    bounds = CONDITION.findall(condition)
    return bool(have) and all(COMPARE[sign](*_padded(have, version_of(bound))) for sign, bound in bounds)


@cache
def known_bad() -> tuple[dict[str, Any], ...]:
    """Return the rows of `known_bad.yaml`."""
    return tuple(yaml.safe_load((files("trimaran.doctor.checks") / "known_bad.yaml").read_text()))


def _too_old(versions: Versions) -> list[Problem]:
    if within(versions.torch, f">={OLDEST_TORCH}"):
        return []
    return [Problem(f"torch {versions.torch} is older than {OLDEST_TORCH}, the oldest tested version",
                    f"pip install 'torch>={OLDEST_TORCH}'")]  # fmt: skip


def _unusable(facts: Facts) -> list[Problem]:
    """Return why torch cannot use this machine's GPUs; nothing if it can, or if the run needs none."""
    versions, needs_gpus = facts.versions, facts.requirements is None or facts.requirements.needs_gpus
    if not facts.gpus or not needs_gpus:
        return []
    if versions.torch.endswith("+cpu"):
        return [Problem(f"torch {versions.torch} is a CPU build and cannot use this machine's GPUs",
                        "install torch with CUDA, see https://pytorch.org/get-started", is_fatal=True)]  # fmt: skip
    torch_cuda, driver_cuda = version_of(versions.torch_cuda), version_of(versions.driver_cuda)
    if torch_cuda and driver_cuda and driver_cuda[0] < torch_cuda[0]:
        # Within a major version older drivers work: docs.nvidia.com/deploy/cuda-compatibility, read 2026-11-15.
        what = f"driver {versions.driver} supports CUDA {versions.driver_cuda}, but torch needs CUDA {torch_cuda[0]}"
        return [Problem(what, "upgrade the driver, or install torch for the driver's CUDA", is_fatal=True)]
    archs = facts.measured.archs if facts.measured else ()
    missing = _without_kernels(facts.measured.capabilities if facts.measured else (), archs)
    if missing:
        what = f"torch has no kernels for {', '.join(sorted(missing))}, only for {', '.join(archs)}"
        return [Problem(what, "install a torch build for these GPUs", is_fatal=True)]
    return []


def _without_kernels(capabilities: tuple[str, ...], archs: tuple[str, ...]) -> set[str]:
    """Return the devices' capabilities (`sm_90`) for which torch has no kernels.

    Kernels run on the same major version with an equal or newer minor one; PTX (`compute_80`) on anything newer.
    """
    matches = [re.match(r"(sm|compute)_(\d+)(\d)", arch) for arch in archs]
    kernels = [(each[1], int(each[2]), int(each[3])) for each in matches if each]
    missing: set[str] = set()
    for name in capabilities:
        wanted = re.match(r"sm_(\d+)(\d)", name)
        if wanted and kernels:
            major, minor = int(wanted[1]), int(wanted[2])
            runs = any(
                (a == major and b <= minor) if kind == "sm" else (a, b) <= (major, minor) for kind, a, b in kernels
            )
            missing |= set() if runs else {name}
    return missing


def _known_bug(row: dict[str, Any]) -> Problem:
    affected = ", ".join(f"{name} {row[name]}" for name in ("torch", "cuda", "nccl", "driver") if name in row)
    return Problem(f"{affected}: {row['what']} ({row['source']})", row["fix"])


def _installed(versions: Versions) -> list[tuple[str, str]]:
    names = ("torch", "torch_cuda", "nccl", "driver", "driver_cuda")
    return [(name, getattr(versions, name)) for name in names if getattr(versions, name)]


def _padded(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both with equal lengths: 2.11 becomes 2.11.0."""
    size = max(len(left), len(right))
    return left + (0,) * (size - len(left)), right + (0,) * (size - len(right))

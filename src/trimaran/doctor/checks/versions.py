"""Versions: torch, CUDA, driver and NCCL, whether they fit together, and pairs that are known not to."""

import operator
import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts, Versions, version_of

LOOK = CheckInfo("H001", "versions")
OLDEST_TORCH = "2.11"
COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq, ">": operator.gt, "<=": operator.le}
CONDITION = re.compile(r"(>=|<=|==|<|>)([\d.]+)")


def check(facts: Facts) -> CheckResult:
    """Say whether torch can use this driver, and whether something installed is known to go wrong."""
    versions = facts.versions
    if not versions.torch:
        return LOOK.fail("torch is not installed", "pip install torch, see https://pytorch.org/get-started")
    troubles = [*_too_old(versions), *_unusable(facts), *(_bad_pair(row) for row in known_bad() if applies(row, facts))]
    return LOOK.worst(troubles, describe(versions), **dict(_told(versions)))


def describe(versions: Versions) -> str:
    names = {"torch": "torch", "torch_cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    return ", ".join(f"{names[name]} {value}" for name, value in _told(versions) if name in names)


def applies(row: dict[str, Any], facts: Facts) -> bool:
    """Whether every condition of `row` holds on this machine; what is not known does not hold."""
    versions, nics = facts.versions, facts.wiring.nics if facts.wiring else ()
    told = {"torch": versions.torch, "cuda": versions.torch_cuda, "nccl": versions.nccl, "driver": versions.driver}
    ranges = all(within(told[name], row[name]) for name in told if name in row)
    gpu = "gpu" not in row or any(word in each.name for word in row["gpu"] for each in facts.gpus)
    arch = "arch" not in row or versions.arch in row["arch"]
    nodes = (facts.work.nodes if facts.work else 1) >= row.get("nodes", 1)
    infiniband = not row.get("infiniband") or any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    return ranges and gpu and arch and nodes and infiniband


def within(version: str, condition: str) -> bool:
    """Whether `version` is in a range such as `>=2.29.7,<2.30.7`; one that is not known is in none."""
    have = version_of(version)
    wanted = CONDITION.findall(condition)
    return bool(have) and all(COMPARE[sign](*_alike(have, version_of(bound))) for sign, bound in wanted)


@cache
def known_bad() -> tuple[dict[str, Any], ...]:
    """Return the rows of `known_bad.yaml`."""
    return tuple(yaml.safe_load((files("trimaran.doctor.checks") / "known_bad.yaml").read_text()))


def _too_old(versions: Versions) -> list[Trouble]:
    if within(versions.torch, f">={OLDEST_TORCH}"):
        return []
    return [Trouble(f"torch {versions.torch} is older than {OLDEST_TORCH}, the oldest that is tested",
                    f"pip install 'torch>={OLDEST_TORCH}'")]  # fmt: skip


def _unusable(facts: Facts) -> list[Trouble]:
    """Return why torch could not use the GPUs that are here, where it could not."""
    versions, wants = facts.versions, facts.work is None or facts.work.kind == "cuda"
    if not facts.gpus or not wants:
        return []
    if versions.torch.endswith("+cpu"):
        return [Trouble(f"torch {versions.torch} cannot use the GPUs of this machine",
                        "install torch with CUDA, see https://pytorch.org/get-started", is_fatal=True)]  # fmt: skip
    built, known = version_of(versions.torch_cuda), version_of(versions.driver_cuda)
    if built and known and known[0] < built[0]:
        # Within a major version older drivers do: docs.nvidia.com/deploy/cuda-compatibility, read 2026-11-15.
        what = f"driver {versions.driver} knows CUDA {versions.driver_cuda}, and torch needs CUDA {built[0]}"
        return [Trouble(what, "upgrade the driver, or install torch for the driver's CUDA", is_fatal=True)]
    archs = facts.measured.archs if facts.measured else ()
    missing = _without_kernels(facts.measured.capabilities if facts.measured else (), archs)
    if missing:
        what = f"torch has no kernels for {', '.join(sorted(missing))}, only for {', '.join(archs)}"
        return [Trouble(what, "install a torch that was built for these GPUs", is_fatal=True)]
    return []


def _without_kernels(capabilities: tuple[str, ...], archs: tuple[str, ...]) -> set[str]:
    """Return the devices' capabilities (`sm_90`) that no kernels run on: those of the same major version and an older
    minor one do, and PTX (`compute_80`) is compiled for anything newer."""
    ready = [re.match(r"(sm|compute)_(\d+)(\d)", arch) for arch in archs]
    kernels = [(each[1], int(each[2]), int(each[3])) for each in ready if each]
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


def _bad_pair(row: dict[str, Any]) -> Trouble:
    with_what = ", ".join(f"{name} {row[name]}" for name in ("torch", "cuda", "nccl", "driver") if name in row)
    return Trouble(f"{with_what}: {row['what']} ({row['source']})", row["fix"])


def _told(versions: Versions) -> list[tuple[str, str]]:
    names = ("torch", "torch_cuda", "nccl", "driver", "driver_cuda")
    return [(name, getattr(versions, name)) for name in names if getattr(versions, name)]


def _alike(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both with as many numbers: 2.11 is 2.11.0."""
    size = max(len(left), len(right))
    return left + (0,) * (size - len(left)), right + (0,) * (size - len(right))

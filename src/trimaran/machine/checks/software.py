"""Checks of installed versions and of environment variables.

What variables do is from the documentation and sources of NCCL and torch, read 2026-11-15:
docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, pytorch.org/docs/stable/notes/cuda.html and
pytorch.org/docs/stable/torch_nccl_environment_variables.html.
"""

import difflib
import operator
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trimaran.core import did_you_mean, templated
from trimaran.machine.checks.machine_facts import CheckInfo, CheckResult, Facts, Problem, version_of
from trimaran.machine.host_limits import openmp_threads

USELESS = {
    "NCCL_TIMEOUT": "is not read by NCCL: the timeout is an argument of the process group (faults in the recipe)",
    "NCCL_LAUNCH_TIMEOUT": "is not read by NCCL",
    "PYTORCH_NCCL_TIMEOUT": "is not read by torch",
    "CUDA_VISIBLE_DEVICE": "has no effect: the name is CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_TIMEOUT": "is not read by torch",
}

OLD_NAMES = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
}

ON = ("1", "TRUE", "YES", "ON")
OFF = ("0", "FALSE", "NO", "OFF")
# Name: harmful values (empty: any value), their effect, and whether it only matters on GPUs.
HARMFUL: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "NCCL_IB_DISABLE": (ON, "disables InfiniBand: nodes communicate over TCP sockets", True),
    "NCCL_P2P_DISABLE": (ON, "disables peer access between GPUs: NVLink is not used", True),
    "NCCL_P2P_LEVEL": (("LOC", "0"), "disables peer access between GPUs: NVLink is not used", True),
    "NCCL_SHM_DISABLE": (ON, "sends messages inside one machine over the network", True),
    "NCCL_NVLS_ENABLE": (OFF, "disables in-switch reductions (NVLink SHARP)", True),
    "NCCL_NET_GDR_LEVEL": (("LOC", "0"), "disables GPUDirect RDMA: messages are copied through host memory", True),
    "NCCL_ALGO": ((), "pins one algorithm for all message sizes; NCCL calls it a debugging variable", True),
    "NCCL_PROTO": ((), "pins one protocol for all message sizes; NCCL calls it a debugging variable", True),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "leaves most of the links idle", True),
    "NCCL_DEBUG": (("INFO", "TRACE"), "makes NCCL log heavily", True),
    "NCCL_CHECK_POINTERS": (ON, "checks every pointer of every call", True),
    "CUDA_LAUNCH_BLOCKING": (ON, "makes the host wait for every kernel", True),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "allocates every tensor with cudaMalloc", True),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "serialises kernel launches, so that little overlaps", True),
    "NVIDIA_TF32_OVERRIDE": (OFF, "keeps matmuls off the tensor cores", True),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "makes the host wait for every collective", True),
    "TORCH_NCCL_NAN_CHECK": (ON, "scans every message for NaN", True),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "adds a collective to check every collective", False),
    "TORCHDYNAMO_DISABLE": (ON, "disables torch.compile", False),
    "TORCH_COMPILE_DISABLE": (ON, "disables torch.compile", False),
    "PYTHONMALLOC": (("DEBUG", "PYMALLOC_DEBUG", "MALLOC_DEBUG"), "checks every Python allocation", False),
    "PYTHONDEVMODE": (ON, "enables Python's run-time checks", False),
    "ATEN_CPU_CAPABILITY": (("DEFAULT",), "disables torch's vectorised CPU kernels", False),
}

# Values of NCCL_ALGO and NCCL_PROTO, in any case of letters, up to 2.32. Collnet was one up to 2.13.
ALGORITHMS = ("Ring", "Tree", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT", "Collnet")
PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@cache
def known_names(whose: str) -> frozenset[str]:
    """Return the names that NCCL (`nccl`) or torch's CUDA allocator (`allocator`) reads."""
    return frozenset(yaml.safe_load((files("trimaran.machine.checks") / "variable_names.yaml").read_text())[whose])


OLDEST_TORCH = "2.11"
COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq, ">": operator.gt, "<=": operator.le}
CONDITION = re.compile(r"(>=|<=|==|<|>)([\d.]+)")


def installed_versions(facts: Facts) -> CheckResult:
    """Report whether torch can use this driver, and whether an installed combination has a known bug."""
    info = CheckInfo("H001", "versions")
    versions = facts.versions
    if not versions.torch:
        return info.fail("torch is not installed", "pip install torch, see https://pytorch.org/get-started")
    problems = _unusable(facts)
    if not within(versions.torch, f">={OLDEST_TORCH}"):
        what = f"torch {versions.torch} is older than {OLDEST_TORCH}, the oldest tested version"
        problems.insert(0, Problem(what, f"pip install 'torch>={OLDEST_TORCH}'"))
    for row in (each for each in known_bad() if applies(each, facts)):
        affected = ", ".join(f"{name} {row[name]}" for name in ("torch", "cuda", "nccl", "driver") if name in row)
        problems.append(Problem(f"{affected}: {row['what']} ({row['source']})", row["fix"]))
    names = ("torch", "torch_cuda", "nccl", "driver", "driver_cuda")
    installed = {name: value for name in names if (value := getattr(versions, name))}
    labels = {"torch": "torch", "torch_cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
    shown = ", ".join(f"{labels[name]} {value}" for name, value in installed.items() if name in labels)
    return info.worst(problems, shown, **installed)


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
    have, bounds = version_of(version), [(sign, version_of(bound)) for sign, bound in CONDITION.findall(condition)]
    zeros = (0,) * max([len(have), *(len(bound) for _, bound in bounds)])  # 2.11 counts as 2.11.0
    return bool(have) and all(
        COMPARE[sign]((have + zeros)[: len(zeros)], (bound + zeros)[: len(zeros)]) for sign, bound in bounds
    )


@cache
def known_bad() -> tuple[dict[str, Any], ...]:
    """Return the rows of `known_bad.yaml`."""
    return tuple(yaml.safe_load((files("trimaran.machine.checks") / "known_bad.yaml").read_text()))


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
    # Kernels run on the same major version with an equal or newer minor one; PTX (`compute_80`) on anything newer.
    matches = [re.match(r"(sm|compute)_(\d+)(\d)", arch) for arch in archs]
    kernels = [(each[1], int(each[2]), int(each[3])) for each in matches if each]
    missing: set[str] = set()
    for name in facts.measured.capabilities if facts.measured else ():
        wanted = re.match(r"sm_(\d+)(\d)", name)
        if wanted and kernels:
            major, minor = int(wanted[1]), int(wanted[2])
            same = [b for kind, a, b in kernels if kind == "sm" and a == major and b <= minor]
            if not same and not any(kind == "compute" and (a, b) <= (major, minor) for kind, a, b in kernels):
                missing.add(name)
    if missing:
        what = f"torch has no kernels for {', '.join(sorted(missing))}, only for {', '.join(archs)}"
        return [Problem(what, "install a torch build for these GPUs", is_fatal=True)]
    return []


UNSET_THREADS = "unset OMP_NUM_THREADS: each rank then gets an equal number of cores"
MIN_TYPO_SIMILARITY = 0.9  # of two names, from which on one is taken for a misspelling of the other


def environment_variables(facts: Facts) -> CheckResult:
    """List the variables to unset or rename. Unknown variables are not reported."""
    info = CheckInfo("H007", "environment variables")
    environment = facts.environment
    on_gpus = bool(facts.gpus) and (facts.requirements is None or facts.requirements.needs_gpus)
    problems = [*useless(environment), *harmful(environment, on_gpus=on_gpus), *misspelt(environment)]
    problems += [*wrong_algorithms(environment), *_allocator(environment), *_interfaces(facts), *_threads(facts)]
    return info.worst(problems, "none that is harmful or has no effect")


def useless(environment: Mapping[str, str]) -> list[Problem]:
    found = [Problem(f"{name} {why}", f"unset {name}") for name, why in USELESS.items() if name in environment]
    old = [(name, new) for name, new in OLD_NAMES.items() if name in environment]
    return [*found, *(Problem(f"{name} is the old name of {new}", f"rename it to {new}") for name, new in old)]


def harmful(environment: Mapping[str, str], *, on_gpus: bool) -> list[Problem]:
    """Return the variables whose value costs speed. CUDA and NCCL variables only matter on GPUs."""
    found: list[Problem] = []
    for name, (values, why, only_gpus) in HARMFUL.items():
        value = environment.get(name)
        bad = value is not None and (value.strip().upper() in values or not values)
        if bad and (on_gpus or not only_gpus):
            found.append(Problem(f"{name}={value} {why}", f"unset {name}"))
    return found


def misspelt(environment: Mapping[str, str]) -> list[Problem]:
    """Return names that look like a misspelt NCCL variable. Plugins have their own names, so unknown ones are fine."""
    others = {*USELESS, *OLD_NAMES, *HARMFUL}
    found: list[Problem] = []
    for name in (each for each in environment if each.startswith("NCCL_") and each not in others):
        known = known_names("nccl")
        close = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=MIN_TYPO_SIMILARITY)
        found += [Problem(f"NCCL has no variable {name}", f"rename it to {each}") for each in close]
    return found


def wrong_algorithms(environment: Mapping[str, str]) -> list[Problem]:
    """Return the words in NCCL_ALGO and NCCL_PROTO that NCCL does not know: since 2.24 it refuses to start.

    The form is `ring,tree;allreduce:^tree`: lists for all functions or for one, and `^` inverts a list.
    """
    found: list[Problem] = []
    for name, known in (("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS)):
        for part in environment.get(name, "").split(";"):
            function, colon, words = part.rpartition(":")
            if colon and function.strip().lower() not in NCCL_FUNCTIONS:
                found.append(
                    Problem(
                        f"{name}: NCCL has no function '{function.strip()}'",
                        templated("use one of {nccl_functions}", nccl_functions=", ".join(NCCL_FUNCTIONS)),
                    )
                )
            for word in words.strip().removeprefix("^").split(","):
                if word.strip() and word.strip().lower() not in {each.lower() for each in known}:
                    what = f"{name}: NCCL does not know '{word.strip()}'{did_you_mean(word.strip(), known)}"
                    found.append(Problem(what, f"use some of {', '.join(known)}, or unset {name}"))
    return found


def _allocator(environment: Mapping[str, str]) -> list[Problem]:
    found: list[Problem] = []
    for name in ALLOCATOR_NAMES:
        flat = re.sub(r"\[[^]]*\]", "", environment.get(name, ""))  # roundup_power2_divisions:[256:1,512:2]
        for key in (part.partition(":")[0].strip() for part in flat.split(",") if part.strip()):
            if key not in (known := known_names("allocator")):
                what = f"{name}: torch's allocator has no option '{key}'{did_you_mean(key, known)}"
                found.append(Problem(what, f"correct {name}: the format is key:value,key:value"))
    return found


def _interfaces(facts: Facts) -> list[Problem]:
    """Return named network interfaces that do not exist. gloo refuses to start then."""
    existing = facts.interconnect.interfaces if facts.interconnect else frozenset()
    if not existing:
        return []
    ranks, names = facts.requirements.ranks if facts.requirements else 1, ", ".join(sorted(existing))
    found: list[Problem] = []
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if missing := [each for each in gloo.split(",") if each and each not in existing]:
        what = f"GLOO_SOCKET_IFNAME is {gloo}, but this machine has no {', '.join(missing)}"
        found.append(Problem(what, f"unset it, or name one of {names}", is_fatal=ranks > 1))
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    matches = any(name.startswith(each) for each in nccl.split(",") for name in existing)
    if nccl and nccl[0] not in "^=" and not matches:
        found.append(Problem(f"NCCL_SOCKET_IFNAME is {nccl}, but no interface name starts with that",
                             f"unset it, or name one of {names}"))  # fmt: skip
    return found


def _threads(facts: Facts) -> list[Problem]:
    """Report too many threads. If the variable is unset, each rank gets an equal number of cores."""
    value = facts.environment.get("OMP_NUM_THREADS", "")
    ranks, cores = facts.requirements.ranks_here if facts.requirements else 1, facts.host.cores
    threads = openmp_threads(value)
    if threads is None:
        wrong = f"OMP_NUM_THREADS is '{value[:40]}', which is not a number of threads, nor a list such as 2,1"
        return [Problem(wrong, UNSET_THREADS, is_fatal=True)] if value else []
    if threads * ranks > 2 * cores:
        return [Problem(f"OMP_NUM_THREADS={value} for {ranks} ranks oversubscribes {cores} cores", UNSET_THREADS)]
    return []

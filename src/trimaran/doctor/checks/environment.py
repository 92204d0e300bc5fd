"""Environment variables that slow a run down, break it, or do nothing although somebody thinks they do."""

import difflib
import re
from collections.abc import Mapping

from trimaran.core import nearest
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.checks.variables import ALLOCATOR_NAMES, HARMFUL, OLD_NAMES, USELESS, known_names
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H007", "environment variables")
LIKENESS = 0.9  # of names, from which on one is taken for a slip of the pen


def check(facts: Facts) -> CheckResult:
    """Say which variables are to be unset or spelt otherwise; the others are nobody's business."""
    environment = facts.environment
    on_gpus = bool(facts.gpus) and (facts.work is None or facts.work.kind == "cuda")
    troubles = [*useless(environment), *harmful(environment, on_gpus=on_gpus), *_misspelt(environment)]
    troubles += [*_allocator(environment), *_interfaces(facts), *_threads(facts)]
    return LOOK.worst(troubles, "none that slows a run down or does nothing")


def useless(environment: Mapping[str, str]) -> list[Trouble]:
    found = [Trouble(f"{name} {why}", f"unset {name}") for name, why in USELESS.items() if name in environment]
    old = [(name, new) for name, new in OLD_NAMES.items() if name in environment]
    return [*found, *(Trouble(f"{name} is the old name of {new}", f"rename it to {new}") for name, new in old)]


def harmful(environment: Mapping[str, str], *, on_gpus: bool) -> list[Trouble]:
    """Return the variables whose value costs speed. Those of CUDA and NCCL matter on GPUs only."""
    found: list[Trouble] = []
    for name, (values, why, only_gpus) in HARMFUL.items():
        value = environment.get(name)
        bad = value is not None and (value.strip().upper() in values or not values)
        if bad and (on_gpus or not only_gpus):
            found.append(Trouble(f"{name}={value} {why}", f"unset {name}"))
    return found


def _misspelt(environment: Mapping[str, str]) -> list[Trouble]:
    """Return names that NCCL does not have but that are within a slip of one it has. Plugins have names of their own,
    so that an unknown name alone says nothing."""
    asked = [name for name in environment if name.startswith("NCCL_") and name not in {*USELESS, *OLD_NAMES, *HARMFUL}]
    found: list[Trouble] = []
    for name in asked:
        known = known_names("nccl")
        close = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS)
        found += [Trouble(f"NCCL has no {name}", f"rename it to {each}") for each in close]
    return found


def _allocator(environment: Mapping[str, str]) -> list[Trouble]:
    found: list[Trouble] = []
    for name in ALLOCATOR_NAMES:
        flat = re.sub(r"\[[^]]*\]", "", environment.get(name, ""))  # roundup_power2_divisions:[256:1,512:2]
        for key in (part.partition(":")[0].strip() for part in flat.split(",") if part.strip()):
            if key not in (known := known_names("allocator")):
                what = f"{name}: torch's allocator has no '{key}'{nearest(key, known)}"
                found.append(Trouble(what, f"correct {name}: it is key:value,key:value"))
    return found


def _interfaces(facts: Facts) -> list[Trouble]:
    """Return interfaces that are named and not there. gloo refuses to start then."""
    have = facts.wiring.interfaces if facts.wiring else frozenset()
    if not have:
        return []
    ranks, own = facts.work.ranks if facts.work else 1, ", ".join(sorted(have))
    found: list[Trouble] = []
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if missing := [each for each in gloo.split(",") if each and each not in have]:
        what = f"GLOO_SOCKET_IFNAME is {gloo}, and this machine has no {', '.join(missing)}"
        found.append(Trouble(what, f"unset it, or name one of {own}", is_fatal=ranks > 1))
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    begins = any(name.startswith(each) for each in nccl.split(",") for name in have)
    if nccl and nccl[0] not in "^=" and not begins:
        found.append(Trouble(f"NCCL_SOCKET_IFNAME is {nccl}, and no interface here begins so",
                             f"unset it, or name one of {own}"))  # fmt: skip
    return found


def _threads(facts: Facts) -> list[Trouble]:
    """Return too many threads. Unset is well: each rank then gets its share of the cores."""
    asked = facts.environment.get("OMP_NUM_THREADS", "")
    ranks, cores = facts.work.ranks_here if facts.work else 1, facts.host.cores
    if asked.isdigit() and int(asked) * ranks > 2 * cores:
        return [Trouble(f"OMP_NUM_THREADS={asked} for {ranks} ranks on {cores} cores: threads wait for each other",
                        "unset OMP_NUM_THREADS: each rank then gets its share")]  # fmt: skip
    if asked and not asked.replace(",", "").isdigit():
        return [Trouble(f"OMP_NUM_THREADS='{asked}' is not a number", "unset OMP_NUM_THREADS")]
    return []

"""H007: environment variables that slow a run down, break it, or have no effect."""

import difflib
import re
from collections.abc import Mapping

from trimaran.core import did_you_mean
from trimaran.doctor.checks.known_variables import (
    ALGORITHMS,
    ALLOCATOR_NAMES,
    HARMFUL,
    NCCL_FUNCTIONS,
    OLD_NAMES,
    PROTOCOLS,
    USELESS,
    known_names,
)
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts
from trimaran.hardware.host_limits import openmp_threads

INFO = CheckInfo("H007", "environment variables")
UNSET_THREADS = "unset OMP_NUM_THREADS: each rank then gets an equal number of cores"
MIN_TYPO_SIMILARITY = 0.9  # of two names, from which on one is taken for a misspelling of the other


def check(facts: Facts) -> CheckResult:
    """List the variables to unset or rename. Unknown variables are not reported."""
    environment = facts.environment
    on_gpus = bool(facts.gpus) and (facts.requirements is None or facts.requirements.needs_gpus)
    problems = [*useless(environment), *harmful(environment, on_gpus=on_gpus), *misspelt(environment)]
    problems += [*wrong_algorithms(environment), *_allocator(environment), *_interfaces(facts), *_threads(facts)]
    return INFO.worst(problems, "none that is harmful or has no effect")


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
                found.append(Problem(f"{name}: NCCL has no function '{function.strip()}'",
                                     f"use one of {', '.join(NCCL_FUNCTIONS)}"))  # fmt: skip
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

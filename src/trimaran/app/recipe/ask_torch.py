"""Asks processes that import torch, and keeps the answers: what it can do with a model, how fast this CPU is."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from trimaran.core import ModelSection, UserError
from trimaran.launch.supervise.early_supervisor import early_processes, resume_early
from trimaran.machine import Cluster, calibration_folder, openmp_threads, parse_cluster
from trimaran.machine.cpu_rates import CpuRates, parse_cpu_rates, write_cpu_rates
from trimaran.machine.detect import cpu_rates_file, threads_per_rank, usable_cores, with_cpu_rates
from trimaran.models.hf_facts import HfFacts, cached_facts, facts_file, facts_from_dict, missing_package, write_facts

LIMIT_SECONDS = 300.0  # 12 s of CPU time for 56 layers, but the machine may be busy
logger = logging.getLogger(__name__)

MEASURE_SECONDS = 0.2  # besides the start of torch
MEASURE_LIMIT_SECONDS = 20.0  # on a machine that is so busy, the rates would be wrong
MAX_RANKS = 8  # that are measured on a machine with fewer cores
MAX_SCATTER = 0.1  # of rates that are kept for good; with more, other programs were running
RETRY_SECONDS = 600.0  # until rates with more scatter are measured again


def ask_hf_facts(section: ModelSection, environ: Mapping[str, str]) -> tuple[HfFacts | None, str]:
    """Return what training can do with a model, or why that is unknown; both are empty for ours. Uses the cache."""
    if not section.kind.is_hf or section.path is None:
        return None, ""
    if (facts := cached_facts(section, environ)) is not None:
        return facts, ""
    if package := missing_package():
        return None, f"{package} is not installed here"
    try:
        facts, reason = _find(section, environ)
        path = facts_file(section, environ) if facts else None
    except (OSError, ValueError, KeyError, TypeError, UserError, subprocess.SubprocessError) as error:
        return None, _why(error)
    if facts is not None and path is not None:
        try:
            write_facts(path, facts)
        except OSError as error:
            logger.warning("what training can do with this model is not kept in %s: %s", path, error.strerror)
    return facts, reason


def _find(section: ModelSection, environ: Mapping[str, str]) -> tuple[HfFacts | None, str]:
    if sys.stderr.isatty():
        typer.echo("building the model without weights to see which axes it supports: seconds, once", err=True)
    arguments = [str(section.path), *(["--trust-remote-code"] if section.trust_remote_code else [])]
    alone = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = _ask("trimaran.train.find_hf_facts", arguments, {**environ, **alone}, seconds=LIMIT_SECONDS)
    if "unknown" in answer:
        return None, f"transformers cannot build it without weights: {answer['unknown']}"
    return facts_from_dict(answer["facts"]), ""


def cluster_of_text(
    text: str,
    environ: Mapping[str, str],
    *,
    measure: Callable[[int, int, Mapping[str, str]], CpuRates | None] | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> Cluster:
    """Return the cluster that `text` names. If that is this CPU, its rates are measured unless they are in the cache.

    Where they cannot be measured or written, a warning says so and the prediction is not calibrated. Rates of a busy
    machine are measured again after `retry_seconds`. `measure` takes ranks, threads and the environment.
    """
    visible, folder = environ.get("CUDA_VISIBLE_DEVICES"), calibration_folder(environ)
    threads = openmp_threads(environ.get("OMP_NUM_THREADS"))
    cluster = parse_cluster(text, visible_devices=visible, calibrations=folder, threads=threads)
    rates, ranks = cluster.device.cpu_rates, cluster.devices_per_node
    path = cpu_rates_file(folder, ranks, threads)
    is_here = cluster.device.traits.shares_cores and not text.endswith((".yaml", ".yml"))
    if not is_here or path is None or ranks > max(MAX_RANKS, usable_cores()):
        return cluster
    if rates is None or (rates.scatter > MAX_SCATTER and _is_old(path, retry_seconds)):
        new = (measure or _measure)(ranks, threads or threads_per_rank(ranks), environ)
        if new is not None and (rates is None or new.scatter < rates.scatter):
            try:
                write_cpu_rates(path, new)
            except OSError as error:
                logger.warning("the rates of this CPU are not kept in %s: %s", path, error.strerror)
                return with_cpu_rates(cluster, new, keeps_links=bool(cluster.links))
            # What was fitted to runs applies to them.
            return parse_cluster(text, visible_devices=visible, calibrations=folder, threads=threads)
    return cluster


def _measure(ranks: int, threads: int, environ: Mapping[str, str]) -> CpuRates | None:
    """Return the rates of `ranks` ranks of this machine that run at once; None if they cannot be measured."""
    if sys.stderr.isatty():
        typer.echo("measuring how fast this CPU trains: about 3 seconds, once", err=True)
    arguments = [f"--ranks={ranks}", f"--threads={threads}", f"--seconds={MEASURE_SECONDS}"]
    arguments += [f"--pause={pid}" for pid in early_processes()]  # which are importing torch
    alone = {"GLOO_SOCKET_IFNAME": "lo", **environ}
    try:
        found = _ask("trimaran.machine.probe.measure_cpu", arguments, alone, seconds=MEASURE_LIMIT_SECONDS)
        return parse_cpu_rates(found)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        resume_early()  # the measuring process may have been killed while they were stopped
        logger.warning("this CPU could not be measured, so predictions are not calibrated: %s", _why(error))
        return None


def _ask(module: str, arguments: Sequence[str], environment: Mapping[str, str], *, seconds: float) -> Any:
    """Return the JSON in the last line that a module of ours prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, env=environment)
    return json.loads("".join(done.stdout.strip().splitlines()[-1:]))


def _why(error: Exception) -> str:
    """Return the last line that the process wrote on its standard error, or else the error."""
    return "".join((getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:])[:200]


def _is_old(path: Path, retry_seconds: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > retry_seconds
    except OSError:
        return True

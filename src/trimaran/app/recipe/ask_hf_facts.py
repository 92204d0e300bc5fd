"""Asks what our trainer can do with a Hugging Face model: once for each model, in a process that imports torch."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping

import typer

from trimaran.core import ModelSection, UserError
from trimaran.models.hf_facts import HfFacts, cached_facts, facts_file, facts_from_dict, missing_package, write_facts

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 300.0  # 12 s of CPU time for 56 layers, but the machine may be busy


def ask_hf_facts(section: ModelSection, environ: Mapping[str, str]) -> tuple[HfFacts | None, str]:
    """Return what our trainer can do with the model, and if that is not known, why. Nothing is downloaded.

    Both are empty for our own models. What was found is kept in the user's cache.
    """
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
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        return None, "".join(last)[:200]
    if facts is not None and path is not None:
        try:
            write_facts(path, facts)
        except OSError as error:
            logger.warning("what training can do with this model is not kept in %s: %s", path, error.strerror)
    return facts, reason


def _find(section: ModelSection, environ: Mapping[str, str]) -> tuple[HfFacts | None, str]:
    if sys.stderr.isatty():
        typer.echo("building the model without weights to see which axes it supports: seconds, once", err=True)
    command = [sys.executable, "-m", "trimaran.train.find_hf_facts", str(section.path)]
    command += ["--trust-remote-code"] if section.trust_remote_code else []
    alone = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True,
                          env={**environ, **alone})  # fmt: skip
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if "unknown" in answer:
        return None, f"transformers cannot build it without weights: {answer['unknown']}"
    return facts_from_dict(answer["facts"]), ""

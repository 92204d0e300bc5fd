"""Reads what `trimaran tune` is asked for: the recipe, the planner's plans for it, and the folder of its results."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from trimaran.app.recipe.ask_hf_facts import ask_hf_facts
from trimaran.app.recipe.hub_files import with_local_files
from trimaran.app.recipe.options import RUNS
from trimaran.app.recipe.recipe_tokenizer import with_model_tokenizer
from trimaran.app.recipe.request import Request, read_question, refuse_other_machine, with_absolute_paths
from trimaran.core import Plan, Recipe
from trimaran.core.version import VERSION
from trimaran.machine import refuse_mixed
from trimaran.models import refuse_freezing
from trimaran.planner import Question
from trimaran.planner.measure.run_index import job_of_plan
from trimaran.planner.search.goals import no_fit_error, search

MAX_PLANS = 24  # of the planner, each with another mesh
TUNED_FOLDER = "tune"  # below runs/
# Of the data section: what changes how long a step takes, and not only which samples it has.
SHAPE_OF_DATA = ("source", "seq_len", "images_per_sample", "image_size", "isolate_documents", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A recipe to tune. `recipe` is that of the trials; `written` is the user's own, with absolute paths.

    about: what the results depend on; it names their folder.
    """

    question: Question
    recipe: Recipe
    written: Recipe
    ranked: tuple[Plan, ...]
    about: dict[str, Any]
    folder: Path

    @property
    def as_run(self) -> Request:
        """The run of the planner's first choice, for the checks that `train` makes."""
        question = self.question
        return Request(recipe=self.recipe, spec=question.spec, outline=question.outline, cluster=question.cluster,
                       plan=self.ranked[0])  # fmt: skip

    @property
    def free_workers(self) -> bool:
        """Whether the recipe leaves the number of loader processes open."""
        return "workers" not in self.question.recipe.data.model_fields_set


def read_tune_request(file: str | None, settings: Sequence[str], folder: Path | None) -> TuneRequest:
    """Return the recipe in `file` with `settings` on top and the planner's plans for it, the best first.

    Raises UserError for what `train` refuses, and for a cluster that is not this machine.
    """
    question = read_question(file, settings, trains=True)
    refuse_mixed(question.cluster, "a tuning")
    refuse_other_machine(question.cluster)
    recipe = with_absolute_paths(question.recipe)
    refuse_freezing(recipe.model)
    facts, _ = ask_hf_facts(recipe.model, os.environ)
    question = replace(question, recipe=recipe, facts=facts, max_plans=MAX_PLANS)
    answer = search(question)
    if not answer.ranked:
        raise no_fit_error(answer)
    about = about_of(question)
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    return TuneRequest(
        question=question,
        recipe=with_model_tokenizer(with_local_files(recipe)),
        written=recipe,
        ranked=(*answer.ranked, *(tie.plan for tie in answer.ties)),
        about=about,
        folder=folder or RUNS / TUNED_FOLDER / f"{recipe.name}-{digest}",
    )


def about_of(question: Question) -> dict[str, Any]:
    """Return what measured step times depend on beside the plan: model, data shape, cluster and software."""
    recipe = question.recipe
    job = job_of_plan(recipe, question.outline, str(question.cluster), platform.node())
    data = recipe.data.model_dump(mode="json", include={*SHAPE_OF_DATA})
    data["samples"].pop("images")
    return {
        "model": job.model,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "states": job.states,
        "cluster": job.cluster,
        "host": job.host or platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "data": data,
        "precision": recipe.train.precision,
        "deterministic": recipe.train.deterministic,
        "trimaran": VERSION,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

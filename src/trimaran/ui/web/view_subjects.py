"""What a view on the web page may be about: the example, a model or a recipe on a cluster, or a run.

An address names models, recipes and runs by their names only: no path is read that a page names.
"""

import re
import shlex
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimaran.app.recipe.options import RUNS
from trimaran.core import UserError, did_you_mean
from trimaran.models import PRESETS, VLM_PRESETS
from trimaran.runs import RunDirectory
from trimaran.ui.viz.subject import Subject
from trimaran.ui.viz.viz_request import EXAMPLE, plan_subject, refreshed, run_subject
from trimaran.ui.web.runs_root import RunsRoot

RECIPES = Path("recipes")
CLUSTER = re.compile(r"[A-Za-z0-9+-]{1,64}")
MAX_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectName:
    """Names what a view is about. All empty: the example."""

    plan: str = ""
    cluster: str = ""
    run: str = ""

    @property
    def query(self) -> dict[str, str]:
        fields = {"plan": self.plan, "cluster": self.cluster, "run": self.run}
        return {name: value for name, value in fields.items() if value}


def model_names() -> list[str]:
    return [*PRESETS, *VLM_PRESETS]


def recipe_names() -> list[str]:
    """Return the recipes in the folder `recipes` of the current folder."""
    return sorted(each.name for each in RECIPES.glob("*.yaml")) if RECIPES.is_dir() else []


class SubjectCache:
    """Reads subjects, and keeps the last ones: a view then only computes what it shows."""

    def __init__(self, runs: RunsRoot) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._kept: OrderedDict[SubjectName, tuple[tuple[int, ...], Subject]] = OrderedDict()

    def read(self, name: SubjectName) -> Subject:
        """Return the subject; what a run has measured is read again only if its files have changed."""
        run = self._runs.open(name.run) if name.run else None
        version = files_version(run) if run else ()
        with self._lock:
            kept = self._kept.get(name)
        if kept is not None and kept[0] == version:
            return kept[1]
        if run is not None:
            same_plan = kept is not None and kept[0][:2] == version[:2]
            subject = refreshed(kept[1], run) if kept is not None and same_plan else run_subject(run)
        else:
            subject = plan_subject(_checked_plan(name.plan), _checked_cluster(name.cluster), ())
        with self._lock:
            self._kept[name] = version, subject
            self._kept.move_to_end(name)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return subject

    def command(self, view: str, name: SubjectName, settings: Mapping[str, str]) -> str:
        """Return the command that answers the same."""
        words = ["trimaran", "viz", view]
        if name.run:
            path = self._runs.path / name.run
            is_usual = self._runs.path == RUNS.absolute()
            words += ["--run", name.run if is_usual else str(path)]
        elif name.plan or name.cluster:
            plan = name.plan or EXAMPLE["what"]
            words += ["--plan", str(RECIPES / plan) if plan.endswith(".yaml") else plan]
            words += ["--cluster", name.cluster] if name.cluster else []
        words += [word for control, value in settings.items() for word in ("--with", f"{control}={value}")]
        return shlex.join(words)


def files_version(run: RunDirectory) -> tuple[int, ...]:
    """Return the sizes and times of the files that a view of a run reads; those of the plan come first."""
    found = []
    for file in (run.plan, run.metrics, run.attempts, run.events(0), run.incidents, run.decisions):
        try:
            status = file.lstat()
            found += [status.st_size, status.st_mtime_ns]
        except OSError:
            found += [-1, -1]
    return tuple(found)


def _checked_plan(name: str) -> str | None:
    """Return what the plan's name stands for; None for the example. Raise UserError for any other name."""
    if not name or name in PRESETS or name in VLM_PRESETS:
        return name or None
    if name in recipe_names():
        return str(RECIPES / name)
    near = did_you_mean(name, [*model_names(), *recipe_names()])
    raise UserError("V005", f"there is no model or recipe '{name[:60]}'{near}", where="plan, in the page's address",
                    fix="choose a model from the list, or a recipe in the folder recipes/")  # fmt: skip


def _checked_cluster(name: str) -> str | None:
    if not name or CLUSTER.fullmatch(name):
        return name or None
    raise UserError("V005", f"'{name[:60]}' is not a cluster such as 8xH100", where="cluster, in the page's address",
                    fix="name a number of devices and their type: 2x8xH100")  # fmt: skip

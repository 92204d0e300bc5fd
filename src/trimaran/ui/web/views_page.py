"""The eleven views: a gallery, and a page for each with its modes, controls, and the command that answers the same."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import cast
from urllib.parse import urlencode

from nicegui import run, ui

from trimaran.app import RUNS
from trimaran.core import UserError, did_you_mean
from trimaran.models import PRESETS, VLM_PRESETS
from trimaran.runs import RunDirectory
from trimaran.ui.language import current_language, say, speaking, translate, translate_view
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.view_page import TITLES, draw_mode
from trimaran.ui.viz.catalogue import SHORT_NAMES, build_view, find_view
from trimaran.ui.viz.figures import ModeName, PlanView
from trimaran.ui.viz.subject import Subject
from trimaran.ui.viz.viz_request import EXAMPLE, life_of, measured_of, plan_subject, run_subject
from trimaran.ui.web.controls import Chips, add_control, button, choice, text_field
from trimaran.ui.web.frame import Markup, WebState, empty_state, error_state, page_frame
from trimaran.ui.web.runs_root import RecentValues, RunsRoot, version_of

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
        return {name: value for name, value in asdict(self).items() if value}


def recipe_names() -> list[str]:
    return sorted(each.name for each in RECIPES.glob("*.yaml")) if RECIPES.is_dir() else []


class SubjectCache:
    """Reads subjects, and keeps the last ones: a view then only computes what it shows."""

    def __init__(self, runs: RunsRoot) -> None:
        self._runs, self._kept = runs, RecentValues[SubjectName, Subject](MAX_KEPT)

    def read(self, name: SubjectName) -> Subject:
        """Return the subject; what a run has measured is read again only if its files have changed."""
        run = self._runs.open(name.run) if name.run else None
        version = files_version(run) if run else ()
        kept = self._kept.get(name)
        if kept is not None and kept[0] == version:
            return kept[1]
        if run is not None:
            same_plan = kept is not None and kept[0][:2] == version[:2]
            if kept is not None and same_plan:  # only what the run has measured since is read
                subject = replace(kept[1], run=measured_of(run), life=life_of(run))
            else:
                subject = run_subject(run)
        else:
            plan = _checked_plan(name.plan)
            if name.cluster and not CLUSTER.fullmatch(name.cluster):
                raise UserError("V005.not-cluster", where="cluster, in the page's address", cluster=name.cluster[:60])
            subject = plan_subject(plan, name.cluster or None, ())
        self._kept.add(name, version, subject)
        return subject

    def command(self, view: str, name: SubjectName, settings: Mapping[str, str]) -> str:
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
    """Return the version of the files that a view of a run reads; that of the plan comes first."""
    return version_of((run.plan, run.metrics, run.attempts, run.events(0), run.incidents, run.decisions))


def _checked_plan(name: str) -> str | None:
    """Return what the plan's name stands for; None for the example. Raise UserError for any other name."""
    if not name or name in PRESETS or name in VLM_PRESETS:
        return name or None
    if name in recipe_names():
        return str(RECIPES / name)
    near = did_you_mean(name, [*PRESETS, *VLM_PRESETS, *recipe_names()])
    raise UserError("V005.no-model-recipe", where="plan, in the page's address", name=name[:60], near=near)


REFRESH_SECONDS = 2.0
MAX_RUNS = 200  # of the list
MODES: tuple[ModeName, ...] = ("explain", "simulate", "live")


def add_page(state: WebState) -> None:
    subjects = SubjectCache(state.runs)

    @ui.page("/views")
    async def gallery(plan: str = "", cluster: str = "", run: str = "") -> None:
        name = SubjectName(plan=plan, cluster=cluster, run=run)
        with page_frame(say("Views"), active="/views"):
            cards = [
                tag("a", {"class": "view-card", "href": _address(short, name), "id": f"view-{short}"},
                    tag("svg", {"class": "view-icon", "viewBox": "0 0 120 64", "aria-hidden": "true"},
                        Html(_icons()[short])),
                    tag("h3", None, say(module.TITLE)), tag("p", None, say(module.QUESTION)),
                    tag("code", None, short))
                for short, module in SHORT_NAMES.items()
            ]  # fmt: skip
            lead = say("Eleven questions about how a model is split and trained. Each is explained with a formula, "
                       "simulated by the cost model, and measured by a run.")  # fmt: skip
            about = [tag("p", {"class": "quiet"}, " ".join(name.query.values()))] if name.query else []
            head = [tag("h1", None, say("Views")), tag("p", {"class": "lead"}, lead), *about]
            Markup(tag("div", None, *head, tag("div", {"class": "view-cards"}, *cards)))

    @ui.page("/views/{short}")
    async def view_page(short: str, plan: str = "", cluster: str = "", run: str = "", mode: str = "") -> None:
        module = find_view(short)
        short = next(key for key, each in SHORT_NAMES.items() if each is module)
        usual: ModeName = "live" if run else "simulate"
        chosen = next((each for each in MODES if each == mode), usual)
        name = SubjectName(plan=plan, cluster=cluster, run=run)
        with page_frame(say(module.TITLE), active="/views"):
            back = tag("p", {"class": "quiet"}, tag("a", {"href": _address("", name)}, say("Views")))
            title, question = tag("h1", None, say(module.TITLE)), tag("p", {"class": "lead"}, say(module.QUESTION))
            Markup(tag("header", None, back, title, question))
            await _ViewPage(state, subjects, short, name, chosen).add()


def _address(short: str, name: SubjectName, mode: str = "") -> str:
    query = name.query | ({"mode": mode} if mode else {})
    path = f"/views/{short}" if short else "/views"
    return f"{path}?{urlencode(query)}" if query else path


@cache
def _icons() -> Mapping[str, str]:
    """Return small pictures of what kind of figure each view has: the shapes of an SVG of 120 by 64."""
    return json.loads(files("trimaran.ui.web").joinpath("view_icons.json").read_text(encoding="utf-8"))


class _ViewPage:
    """One open page of a view: its subject and mode, its elements, and what happens when a control is moved."""

    def __init__(self, state: WebState, subjects: SubjectCache, short: str, name: SubjectName, mode: ModeName) -> None:
        self._state, self._subjects, self._language = state, subjects, current_language()
        self._short, self._name, self._mode = short, name, mode
        self._settings: dict[str, str] = {}  # controls that were changed
        self._controls: tuple[object, ...] = ()
        self._version: tuple[int, ...] = ()

    async def add(self) -> None:
        await self._add_subject()
        with ui.element("div").classes("chips modes").props('role="group"'):
            self._chips = Chips({mode: say(TITLES[mode]) for mode in MODES}, self._choose_mode, prefix="mode-")
        with ui.element("div").classes("workshop view-layout"):
            self._panel = ui.element("div").classes("panel").props('id="controls"')
            self._frame = ui.element("div").classes("answer")
            with self._frame:
                self._about = Markup(tag="p").classes("quiet").props('id="about"')
                self._answer = Markup().props('id="answer"')
                self._command = Markup()
        await self._draw()
        if self._name.run:
            self._version = self._run_version()
            ui.timer(REFRESH_SECONDS, self._refresh)

    async def _add_subject(self) -> None:
        name = self._name
        self._cluster = name.cluster

        def open_subject(other: SubjectName) -> None:
            ui.navigate.to(_address(self._short, other, "" if other.run else self._mode))

        def open_plan(plan: str) -> None:
            open_subject(SubjectName(plan=plan, cluster=self._cluster))

        names = await run.io_bound(self._state.runs.names) or ()  # None while the server shuts down
        runs = [each.slug for each in names[:MAX_RUNS]]
        usual = say("as in the run") if name.run else say("Example: llama-3.1-8b")
        plans = {"": usual, **{each: each for each in (*PRESETS, *VLM_PRESETS, *recipe_names())}}
        with ui.element("div").classes("bar-of-controls subject"):
            choice(say("Model or recipe"), plans, open_plan, value=name.plan)
            text_field(say("Cluster"), lambda text: setattr(self, "_cluster", text.strip()), value=name.cluster,
                       hint="2x8xH100")  # fmt: skip
            button(say("Use it"), lambda: open_plan(name.plan))
            options = {"": say("no run"), **{each: each for each in runs}}
            choice(say("Run"), options, lambda slug: open_subject(SubjectName(run=slug)), value=name.run)

    async def _choose_mode(self, mode: str) -> None:
        self._mode = cast("ModeName", mode)
        await self._draw()

    async def _change(self, control: str, value: str) -> None:
        self._settings = {**self._settings, control: value}
        await self._draw(control)

    async def _draw(self, changed: str = "") -> None:
        """Build and draw the view; a mistake is shown in place of it."""

        def build() -> tuple[PlanView, Html]:
            """Return the view and its chosen mode. Settings that no longer apply after `changed` are dropped."""
            subject = self._subjects.read(self._name)
            try:
                view = build_view(self._short, replace(subject, settings=self._settings))
            except UserError as error:
                if error.code not in ("V002", "V003") or not changed:
                    raise
                self._settings = {changed: self._settings[changed]}
                view = build_view(self._short, replace(subject, settings=self._settings))
            with speaking(self._language):
                modes = translate_view(view).modes
                if self._mode in modes:
                    return view, tag("section", {"class": "view-mode"}, *draw_mode(modes[self._mode]))
                text = say("A plan measures nothing. Choose a run to see what it measured.")
                return view, empty_state(text, f"trimaran viz {self._short} --run NAME")

        self._chips.press(self._mode)
        self._frame.classes(add="stale")  # a search of plans may take a second
        try:
            built = await run.io_bound(build)
        except UserError as error:
            self._answer.show(error_state(error))
            return
        finally:
            self._frame.classes(remove="stale")
        if built is None:  # the server shuts down
            return
        view, markup = built
        with speaking(self._language):
            self._about.show(tag("span", None, translate(view.about)))
        self._answer.show(markup)
        command = self._subjects.command(self._short, self._name, self._settings)
        title = tag("h3", None, say("The same in a terminal"))
        self._command.show(tag("div", {"class": "same-command"}, title, tag("pre", {"class": "command"}, command)))
        # Show the controls again if they are others than before: the options of one may depend on another.
        kinds = tuple((each.name, each.options, each.least, each.most) for each in view.controls)
        if kinds == self._controls:
            return
        self._controls = kinds
        self._panel.clear()
        with self._panel:
            Markup(tag("h3", None, say("Controls")))
            for each in view.controls:
                add_control(each, self._change)

    def _run_version(self) -> tuple[int, ...]:
        return files_version(self._state.runs.open(self._name.run))

    async def _refresh(self) -> None:
        try:
            version = await run.io_bound(self._run_version)
        except UserError as error:
            self._answer.show(error_state(error))
            return
        if version is not None and version != self._version:
            self._version = version
            await self._draw()

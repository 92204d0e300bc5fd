"""The eleven views: a gallery, and a page for each with its modes, controls, and the command that answers the same."""

from dataclasses import dataclass, field, replace
from typing import cast
from urllib.parse import urlencode

from nicegui import run, ui

from trimaran.core import UserError
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.view_page import TITLES, draw_mode
from trimaran.ui.viz.catalogue import SHORT_NAMES, build_view, find_view
from trimaran.ui.viz.figures import ModeName, PlanView
from trimaran.ui.viz.texts import Lookup, translate, translate_view
from trimaran.ui.web.controls import button, choice, text_field
from trimaran.ui.web.frame import Markup, empty_state, error_state, page_frame
from trimaran.ui.web.language import Language, chinese, current_language, say, speaking
from trimaran.ui.web.view_controls import add_control
from trimaran.ui.web.view_icons import view_icon
from trimaran.ui.web.view_subjects import SubjectCache, SubjectName, files_version, model_names, recipe_names
from trimaran.ui.web.web_state import WebState

REFRESH_SECONDS = 2.0
MAX_RUNS = 200  # of the list
MODES: tuple[ModeName, ...] = ("explain", "simulate", "live")


def lookup_in(language: Language) -> Lookup:
    """Return the translations of the views' texts."""
    return (lambda text: chinese().get(text)) if language == "zh" else (lambda _: None)


@dataclass(slots=True, kw_only=True)
class ShownView:
    """A view as one page shows it: its subject, its mode, and the controls that were changed."""

    short: str
    name: SubjectName
    mode: ModeName
    language: Language
    settings: dict[str, str] = field(default_factory=dict)
    controls: tuple[object, ...] = ()

    def build(self, subjects: SubjectCache, changed: str = "") -> PlanView:
        """Return the view. Settings that no longer apply after `changed` was changed are dropped."""
        subject = subjects.read(self.name)
        try:
            return build_view(self.short, replace(subject, settings=self.settings))
        except UserError as error:
            if error.code not in ("V002", "V003") or not changed:
                raise
            self.settings = {changed: self.settings[changed]}
            return build_view(self.short, replace(subject, settings=self.settings))

    def draw(self, view: PlanView) -> Html:
        """Return the chosen mode as markup, in the language of the page."""
        lookup = lookup_in(self.language)
        shown = translate_view(view, lookup)
        with speaking(self.language):
            if self.mode not in shown.modes:
                text = say("A plan measures nothing. Choose a run to see what it measured.")
                return empty_state(text, f"trimaran viz {self.short} --run NAME")
            return tag("section", {"class": "view-mode"}, *draw_mode(shown.modes[self.mode], lookup))


def add_page(state: WebState) -> None:
    """Register the gallery at `/views`, and each view at `/views/NAME`."""
    subjects = SubjectCache(state.runs)

    @ui.page("/views")
    async def gallery(plan: str = "", cluster: str = "", run: str = "") -> None:
        name = SubjectName(plan=plan, cluster=cluster, run=run)
        with page_frame(say("Views"), active="/views"):
            Markup(_gallery(name))

    @ui.page("/views/{short}")
    async def view_page(short: str, plan: str = "", cluster: str = "", run: str = "", mode: str = "") -> None:
        module = find_view(short)
        short = next(key for key, each in SHORT_NAMES.items() if each is module)
        usual: ModeName = "live" if run else "simulate"
        chosen = next((each for each in MODES if each == mode), usual)
        name = SubjectName(plan=plan, cluster=cluster, run=run)
        shown = ShownView(short=short, name=name, mode=chosen, language=current_language())
        with page_frame(say(module.TITLE), active="/views"):
            back = tag("p", {"class": "quiet"}, tag("a", {"href": _address("", name)}, say("Views")))
            title, question = tag("h1", None, say(module.TITLE)), tag("p", {"class": "lead"}, say(module.QUESTION))
            Markup(tag("header", None, back, title, question))
            await _ViewPage(state, subjects, shown).add()


def _address(short: str, name: SubjectName, mode: str = "") -> str:
    query = name.query | ({"mode": mode} if mode else {})
    path = f"/views/{short}" if short else "/views"
    return f"{path}?{urlencode(query)}" if query else path


def _gallery(name: SubjectName) -> Html:
    cards = [
        tag("a", {"class": "view-card", "href": _address(short, name), "id": f"view-{short}"},
            view_icon(short), tag("h3", None, say(module.TITLE)), tag("p", None, say(module.QUESTION)),
            tag("code", None, short))
        for short, module in SHORT_NAMES.items()
    ]  # fmt: skip
    lead = say("Eleven questions about how a model is split and trained. Each is explained with a formula, simulated "
               "by the cost model, and measured by a run.")  # fmt: skip
    about = [tag("p", {"class": "quiet"}, " ".join(name.query.values()))] if name.query else []
    return tag("div", None, tag("h1", None, say("Views")), tag("p", {"class": "lead"}, lead), *about,
               tag("div", {"class": "view-cards"}, *cards))  # fmt: skip


class _ViewPage:
    """One open page of a view: its elements, and what happens when a control is moved."""

    def __init__(self, state: WebState, subjects: SubjectCache, shown: ShownView) -> None:
        self._state, self._subjects, self._shown = state, subjects, shown
        self._chips: dict[str, ui.element] = {}
        self._version: tuple[int, ...] = ()

    async def add(self) -> None:
        """Add the elements and draw the view."""
        await self._add_subject()
        with ui.element("div").classes("chips modes").props('role="group"'):
            for mode in MODES:
                self._chips[mode] = button(say(TITLES[mode]), lambda mode=mode: self._choose_mode(mode))
                self._chips[mode].props["id"] = f"mode-{mode}"
        with ui.element("div").classes("workshop view-layout"):
            self._panel = ui.element("div").classes("panel").props('id="controls"')
            self._frame = ui.element("div").classes("answer")
            with self._frame:
                self._about = Markup(tag="p").classes("quiet").props('id="about"')
                self._answer = Markup().props('id="answer"')
                self._command = Markup()
        await self._draw()
        if self._shown.name.run:
            self._version = self._run_version()
            ui.timer(REFRESH_SECONDS, self._refresh)

    async def _add_subject(self) -> None:
        """Add what chooses the subject; another subject is another address."""
        name = self._shown.name
        names = await run.io_bound(self._state.runs.names) or ()  # None while the server shuts down
        runs = [each.slug for each in names[:MAX_RUNS]]
        usual = say("as in the run") if name.run else say("Example: llama-3.1-8b")
        plans = {"": usual, **{each: each for each in (*model_names(), *recipe_names())}}
        with ui.element("div").classes("bar-of-controls subject"):
            choice(say("Model or recipe"), plans, self._open_plan, value=name.plan)
            text_field(say("Cluster"), self._type_cluster, value=name.cluster, hint="2x8xH100")
            button(say("Use it"), self._open_cluster)
            options = {"": say("no run"), **{each: each for each in runs}}
            choice(say("Run"), options, self._open_run, value=name.run)
        self._cluster = name.cluster

    def _open(self, name: SubjectName) -> None:
        ui.navigate.to(_address(self._shown.short, name, "" if name.run else self._shown.mode))

    def _open_plan(self, plan: str) -> None:
        self._open(SubjectName(plan=plan, cluster=self._cluster))

    def _type_cluster(self, cluster: str) -> None:
        self._cluster = cluster.strip()

    def _open_cluster(self) -> None:
        self._open(SubjectName(plan=self._shown.name.plan, cluster=self._cluster))

    def _open_run(self, slug: str) -> None:
        self._open(SubjectName(run=slug))

    async def _choose_mode(self, mode: str) -> None:
        self._shown.mode = cast("ModeName", mode)
        await self._draw()

    async def _change(self, control: str, value: str) -> None:
        self._shown.settings = {**self._shown.settings, control: value}
        await self._draw(control)

    async def _draw(self, changed: str = "") -> None:
        """Build and draw the view; a mistake is shown in place of it."""
        for mode, chip in self._chips.items():
            chip.props["aria-pressed"] = str(mode == self._shown.mode).lower()
        self._frame.classes(add="stale")  # a search of plans may take a second
        try:
            built = await run.io_bound(self._built, changed)
        except UserError as error:
            self._answer.show(error_state(error))
            return
        finally:
            self._frame.classes(remove="stale")
        if built is None:  # the server shuts down
            return
        view, markup = built
        self._about.show(tag("span", None, translate(view.about, lookup_in(self._shown.language))))
        self._answer.show(markup)
        command = self._subjects.command(self._shown.short, self._shown.name, self._shown.settings)
        title = tag("h3", None, say("The same in a terminal"))
        self._command.show(tag("div", {"class": "same-command"}, title, tag("pre", {"class": "command"}, command)))
        self._show_controls(view)

    def _built(self, changed: str) -> tuple[PlanView, Html]:
        view = self._shown.build(self._subjects, changed)
        return view, self._shown.draw(view)

    def _show_controls(self, view: PlanView) -> None:
        """Show the controls again if they are others than before: the options of one may depend on another."""
        kinds = tuple((each.name, each.options, each.least, each.most) for each in view.controls)
        if kinds == self._shown.controls:
            return
        self._shown.controls = kinds
        self._panel.clear()
        with self._panel:
            Markup(tag("h3", None, say("Controls")))
            for each in view.controls:
                add_control(each, self._change)

    def _run_version(self) -> tuple[int, ...]:
        return files_version(self._state.runs.open(self._shown.name.run))

    async def _refresh(self) -> None:
        """Draw again if the run's files have changed."""
        try:
            version = await run.io_bound(self._run_version)
        except UserError as error:
            self._answer.show(error_state(error))
            return
        if version is not None and version != self._version:
            self._version = version
            await self._draw()

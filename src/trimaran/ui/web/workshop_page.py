"""The workshop: choose a model and a cluster, and see at once which plan is best, why, and how to run it."""

import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from nicegui import app, background_tasks, run, ui
from nicegui.events import GenericEventArguments

from trimaran.app import PlanReport, all_plans, occupancy, pareto_set, unit_of
from trimaran.core import Plan, UserError, show_bytes, show_count, show_seconds
from trimaran.machine import DEVICES
from trimaran.planner import GOALS, no_fit_error
from trimaran.ui.language import Language, current_language, say, speaking
from trimaran.ui.report.draw_figure import draw_figure
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Bars, Point, Scatter, stacked_bars
from trimaran.ui.web import workshop as desk_of
from trimaran.ui.web.controls import Chips, button, choice, slider
from trimaran.ui.web.frame import Markup, WebState, error_state, loading_state, page_frame
from trimaran.ui.web.runs_root import StartedRun, start_run
from trimaran.ui.web.workshop import PIN_VALUES, PlanDesk, PlanInputs, pin_values, with_value

STACKED_PLANS = 4
POINT_KINDS = ("chosen", "Pareto set", "slower or larger", "does not fit")
OUTSIDE = "reserve and context"  # what the device must have beyond its tensors


def answer_markup(report: PlanReport, command: str, note: str) -> Html:
    plans = all_plans(report)
    shown = [plan for plan, _ in plans if plan.prediction is not None]
    best = report.best
    if best is None or best.prediction is None:
        verdict = error_state(no_fit_error(report.answer))
    else:
        verdict = Html(tag("h2", None, say("The best plan")) + tag("p", {"class": "lead"}, str(best)))
    parts = [verdict, _tiles(report)]
    if shown:
        parts += [
            tag("div", {"class": "side"}, draw_figure(memory_stack(shown, report)), draw_figure(time_stack(shown))),
            draw_figure(pareto_figure(plans, report)),
        ]
    unit = say("{unit}/s", unit=say(unit_of(report.request.question.outline)))
    names = (say("plan"), say("batch"), say("memory"), say("step"), unit, "")
    head = tag("tr", None, *(tag("th", None, name) for name in names))
    rows = [_plan_row(number, plan, why, report) for number, (plan, why) in enumerate(plans)]
    table = tag("table", {"class": "plans"}, tag("thead", None, head), tag("tbody", None, *rows))
    parts.append(Html(tag("h2", None, say("All plans")) + tag("div", {"class": "scroll"}, table)))
    lists = {
        say("What would change the answer"): report.answer.hints,
        say("Communication settings that differ from the defaults"): report.answer.choices,
        say("Warnings"): report.answer.warnings,
    }
    notes = [tag("section", {"class": "notes"}, tag("h3", None, title),
                 tag("ul", None, *(tag("li", None, each) for each in lines)))
             for title, lines in lists.items() if lines]  # fmt: skip
    parts += [tag("div", None, *notes)] if notes else []
    parts += [tag("p", {"class": "quiet"}, note), tag("pre", {"class": "command"}, command)]
    return Html("".join(parts))


def memory_stack(plans: Sequence[Plan], report: PlanReport) -> Bars:
    cluster = report.answer.cluster
    terms = {name: plan.prediction.memory | {OUTSIDE: plan.prediction.device_bytes - plan.prediction.peak_bytes}
             for name, plan in _named(plans).items() if plan.prediction}  # fmt: skip
    figure = stacked_bars(say("Peak memory of a device"), "bytes", terms,
                          {cluster.device.name: float(cluster.device.memory_bytes)})  # fmt: skip
    return _in_language(figure)


def time_stack(plans: Sequence[Plan]) -> Bars:
    terms = {name: plan.prediction.time for name, plan in _named(plans).items() if plan.prediction}
    return _in_language(stacked_bars(say("Time of a step"), "seconds", terms))


def pareto_figure(plans: Sequence[tuple[Plan, str]], report: PlanReport) -> Scatter:
    best = set(map(id, pareto_set([plan for plan, _ in plans])))
    points = [_point(plan, why, report, on_front=id(plan) in best) for plan, why in plans if plan.prediction]
    points.sort(key=lambda each: [say(kind) for kind in POINT_KINDS].index(each.kind))  # a kind keeps its colour
    return Scatter(
        title=say("Step time against memory"),
        x_name=say("memory of a device"),
        x_unit="bytes",
        y_name=say("step"),
        y_unit="seconds",
        points=tuple(points),
        x_limit=float(report.answer.cluster.device.memory_bytes),
    )


def _point(plan: Plan, why: str, report: PlanReport, *, on_front: bool) -> Point:
    prediction = plan.prediction
    assert prediction is not None
    chosen, front, beaten, too_large = POINT_KINDS
    kind = chosen if plan is report.best else too_large if not prediction.fits else front if on_front else beaten
    return Point(name=short_plan(plan, report.best), x=float(prediction.device_bytes), y=float(prediction.step_seconds),
                 kind=say(kind), note=why)  # fmt: skip


def short_plan(plan: Plan, best: Plan | None = None) -> str:
    """Return a plan as short text: the mesh, what differs from the simplest, and what else differs from the best."""
    parts = [str(plan.mesh)]
    parts += [plan.pipeline.schedule] if plan.mesh.pp > 1 else []
    parts += [f"shard {plan.sharding}"] if plan.sharding != "none" else []
    parts += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    parts += [f"offload {plan.offload}"] if plan.offload != "none" else []
    if best is not None and plan.loss != best.loss:
        parts.append(f"loss {plan.loss}")
    if best is not None and plan.comm.overlap != best.comm.overlap:
        parts.append("overlap" if plan.comm.overlap else "no overlap")
    return ", ".join(parts)


def _named(plans: Sequence[Plan]) -> dict[str, Plan]:
    named: dict[str, Plan] = {}
    for plan in plans[:STACKED_PLANS]:
        name = f"{short_plan(plan)}, {plan.micro_batch} x {plan.grad_accum}"
        named[name if name not in named else f"{name} ({len(named) + 1})"] = plan
    return named


def _in_language(figure: Bars) -> Bars:
    series = tuple(replace(each, name=say(each.name)) for each in figure.series if any(each.values))
    return replace(figure, series=series)


def _tiles(report: PlanReport) -> Html:
    best, cluster = report.best, report.answer.cluster
    if best is None or (prediction := best.prediction) is None:
        return Html("")
    unit, size = say(unit_of(report.request.question.outline)), show_bytes(cluster.device.memory_bytes)
    tiles: Mapping[str, str] = {
        say("a step, ±{error}", error=f"{prediction.error:.0%}"): show_seconds(prediction.step_seconds),
        say("{unit}/s", unit=unit): show_count(prediction.tokens_per_second),
        say("{percent} of {size} a device", percent=f"{occupancy(prediction, cluster):.0%}", size=size): show_bytes(
            prediction.device_bytes
        ),
        say("MFU"): f"{prediction.mfu:.0%}" if prediction.mfu_is_known else "",
    }
    shown = [tag("div", {"class": "tile"}, tag("b", None, value), tag("span", None, name))
             for name, value in tiles.items() if value]  # fmt: skip
    return tag("div", {"class": "tiles"}, *shown)


def _plan_row(number: int, plan: Plan, why: str, report: PlanReport) -> Html:
    prediction, is_best = plan.prediction, plan is report.best
    numbers = ["", "", ""]
    if prediction is not None:
        memory = f"{show_bytes(prediction.device_bytes)} {occupancy(prediction, report.answer.cluster):.0%}"
        numbers = [memory, show_seconds(prediction.step_seconds), show_count(prediction.tokens_per_second)]
    reason = why or say("It is slower than the chosen plan, by the numbers in this row.")
    why_not = tag("details", None, tag("summary", None, say("Why not this one?")), tag("p", None, reason))
    verdict = tag("p", {"class": "good"}, say("chosen")) if is_best else why_not
    pin = tag("button", {"type": "button", "class": "plain", "data-value": number}, say("Pin"))
    cells = [
        tag("td", None, short_plan(plan, report.best), verdict),
        tag("td", None, f"{plan.micro_batch} x {plan.grad_accum}"),
        *(tag("td", None, each) for each in numbers),
        tag("td", None, pin),
    ]
    return tag("tr", {"class": "chosen" if is_best else None}, *cells)


DESK = PlanDesk()  # one for all pages: answers do not depend on who asks
POLL_SECONDS = 0.5
TEXTS = {"recipe": "Recipe", "train": "Command", "slurm": "sbatch", "k8s": "Kubernetes manifest"}


class Workshop:
    """One open page: what is chosen, the last answer, and which text is shown."""

    def __init__(self, state: WebState, language: Language) -> None:
        self.state, self.language = state, language
        self.inputs = PlanInputs()
        self.report: PlanReport | None = None  # what is shown
        self._last: PlanReport | None = None  # the last answer of the search
        self.text_kind = "recipe"
        self._searched: PlanInputs | None = None
        self._is_searching = False

    def build(self) -> None:
        with ui.element("div").classes("workshop"):
            self.panel = ui.element("div").classes("panel")
            with ui.element("div").classes("answer"):
                self._loading = loading_state(say("Searching plans"))
                self.status = Markup(self._loading)
                self.answer = Markup().on("click", self._pin_plan, ["value"])
                self.texts = ui.element("section").classes("texts")
        self._build_panel()
        with self.texts:
            Markup(tag("h2", None, say("Run it")))
            with ui.element("div").classes("tabs"):
                names = {kind: say(name) for kind, name in TEXTS.items()}
                self.tabs = Chips(names, self._choose_text, pressed=[self.text_kind])
            self.text = Markup()
            with ui.element("div").classes("more-runs"):
                self.start = button(say("Start the run here"), self._start, is_main=True)
                self.started = Markup()
            if not self.state.may_write:
                self.start.props["disabled"] = True
                self.started.show(tag("p", {"class": "quiet"}, say("This page only reads. To start runs from it:"),
                                      tag("pre", {"class": "command"}, "trimaran ui --write")))  # fmt: skip

    def _build_panel(self) -> None:
        self.panel.clear()
        inputs = self.inputs
        with self.panel, speaking(self.language):
            choice(say("Model or recipe"), desk_of.model_options(), self._choose_model, value=inputs.what)
            devices = {desk_of.THIS_MACHINE: say("this machine"), **{name: name for name in DEVICES}, "cpu": "CPU"}
            choice(say("Device"), devices, self._set("device"), value=inputs.device)
            slider(say("Nodes"), desk_of.NODES, self._set("nodes"), value=str(inputs.nodes))
            slider(say("Devices of a node"), desk_of.DEVICES_PER_NODE, self._set("devices"), value=str(inputs.devices))
            lengths = with_value(desk_of.LENGTHS, inputs.seq_len)
            slider(say("Tokens of a sequence"), lengths, self._set("seq_len"), value=str(inputs.seq_len))
            batches = with_value(desk_of.BATCHES, inputs.global_batch)
            slider(say("Sequences of a step"), batches, self._set("global_batch"), value=str(inputs.global_batch))
            choice(say("Goal"), {each: say(each) for each in GOALS}, self._set("goal"), value=inputs.goal)
            adapters = {"": say("none: train all weights"), "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}
            choice(say("Adapter"), adapters, self._set("adapter"), value=inputs.adapter)
            steps = inputs.steps or 100
            slider(say("Steps of the run"), with_value(desk_of.STEPS, steps), self._set("steps"), value=str(steps))
            Markup(tag("h3", None, say("Pinned fields of the plan")))
            with ui.element("div").classes("pair"):
                pinned = dict(self.inputs.pins)
                for field in PIN_VALUES:
                    values = dict.fromkeys((*pin_values(field), *([pinned[field]] if field in pinned else [])))
                    options = {"": say("automatic"), **{each: each for each in values}}
                    choice(field, options, lambda value, field=field: self.ask(self.inputs.with_pin(field, value)),
                           value=pinned.get(field, ""))  # fmt: skip
            button(say("Release all pins"), self._release)

    def _set(self, field: str) -> Callable[[str], Awaitable[None]]:
        is_number = isinstance(getattr(self.inputs, field), int)

        async def changed(value: str) -> None:
            change: dict[str, Any] = {field: int(value) if is_number else value}
            await self.ask(replace(self.inputs, **change))

        return changed

    async def _choose_model(self, what: str) -> None:
        """Use another model; a recipe brings its own sizes, except what the user changes while it is read."""
        chosen = sized = self.inputs = replace(self.inputs, what=what)
        with suppress(UserError):  # the answer says what is wrong with the recipe
            sized = await run.io_bound(desk_of.with_sizes, chosen) or chosen
        names = [each.name for each in fields(chosen)]
        own = {name: getattr(sized, name) for name in names if getattr(sized, name) != getattr(chosen, name)}
        own = {name: size for name, size in own.items() if getattr(self.inputs, name) == getattr(chosen, name)}
        if self.inputs.what != what:
            return  # another model was chosen meanwhile
        if own:
            self.inputs = replace(self.inputs, **own)
            self._build_panel()
        await self.ask(self.inputs)

    async def _release(self) -> None:
        self.inputs = replace(self.inputs, pins=())
        self._build_panel()
        await self.ask(self.inputs)

    async def _pin_plan(self, event: GenericEventArguments) -> None:
        number = str(event.args.get("value", "")) if isinstance(event.args, dict) else ""
        plans = all_plans(self.report) if self.report else []
        if number.isdigit() and int(number) < len(plans):
            self.inputs = self.inputs.with_plan(plans[int(number)][0])
            self._build_panel()
            await self.ask(self.inputs)

    async def ask(self, inputs: PlanInputs) -> None:
        """Show the answer for the inputs: at once from memory or from known plans, then that of the search."""
        self.inputs = inputs
        if DESK.find(inputs) is None:
            self.status.show(self._loading)
            self.answer.classes(add="stale")
            await self._show(inputs, self._price_known)
        await self._search_newest()

    async def _search_newest(self) -> None:
        """Search until the answer is that of the newest inputs; one search at a time."""
        if self._is_searching:
            return
        self._is_searching = True
        try:
            while self._searched != self.inputs:
                self._searched = self.inputs
                await self._show(self._searched, self._search)
        finally:
            self._is_searching = False
        self.status.show(Html(""))
        self.answer.classes(remove="stale")
        await self._show_text()

    async def _show(self, inputs: PlanInputs, find: Callable[[PlanInputs], tuple[PlanReport | None, Html]]) -> None:
        """Show what a thread finds, unless the inputs have changed meanwhile."""
        began = time.perf_counter()
        try:
            found = await run.io_bound(find, inputs)
        except UserError as error:
            found = None, error_state(error)
        if found is None or inputs != self.inputs or not found[1]:
            return
        self.report = found[0]
        self.answer.props["data-seconds"] = f"{time.perf_counter() - began:.4f}"
        self.answer.show(found[1])

    def _price_known(self, inputs: PlanInputs) -> tuple[PlanReport | None, Html]:
        if self._last is None or (report := desk_of.first_answer(inputs, self._last)) is None:
            return None, Html("")
        with speaking(self.language):
            note = say("Only the plans of the last answer so far, with the new numbers. The search goes on.")
            return report, answer_markup(report, inputs.command, note)

    def _search(self, inputs: PlanInputs) -> tuple[PlanReport | None, Html]:
        began, is_kept = time.perf_counter(), DESK.find(inputs) is not None
        self._last = report = DESK.answer(inputs)
        with speaking(self.language):
            milliseconds = round(1000 * (time.perf_counter() - began))
            took = say("from memory") if is_kept else say("{count} ms", count=milliseconds)
            searched = say("{count} plans were searched ({took}). The same answer in a terminal:",
                           count=f"{report.answer.num_considered:,}", took=took)  # fmt: skip
            return report, answer_markup(report, inputs.command, searched)

    async def _choose_text(self, kind: str) -> None:
        self.text_kind = kind
        self.tabs.press(kind)
        await self._show_text()

    async def _show_text(self) -> None:
        can_run = self.report is not None and self.report.best is not None
        self.texts.set_visibility(can_run)
        if self.report is None or not can_run:
            return
        try:
            self.text.show(await run.io_bound(self._text_markup, self.report, self.text_kind) or Html(""))
        except UserError as error:
            self.text.show(error_state(error))

    def _text_markup(self, report: PlanReport, kind: str) -> Html:
        """Return the text to copy, and the command that prints the same; it runs in a thread."""
        with speaking(self.language):
            if kind == "recipe":
                return tag("pre", {"class": "command"}, desk_of.recipe_text(report))
            if kind == "train":
                caution = [tag("p", None, report.caution)] if report.caution else []
                return tag("div", None, *caution, tag("pre", {"class": "command"}, report.next_command))
            words = shlex.join(["trimaran", *desk_of.launch_words(report, kind)])
            about = tag("p", {"class": "quiet"}, say("This is what the command prints:"))
            text = tag("pre", {"class": "command"}, desk_of.launch_text(report, kind))
            return tag("div", None, text, about, tag("pre", {"class": "command"}, words))

    async def _start(self) -> None:
        if self.report is None:
            return
        self.started.show(loading_state(say("Starting the run")))
        report, name = self.report, self.report.request.question.recipe.name
        try:
            started = await run.io_bound(
                start_run, self.state.runs, desk_of.recipe_text(report), name, may_write=self.state.may_write
            )
        except UserError as error:
            self.started.show(error_state(error))
            return
        if started is not None:
            timer = ui.timer(POLL_SECONDS, lambda: self._follow(started, timer))

    def _follow(self, started: StartedRun, timer: ui.timer) -> None:
        if started.exists:
            link = tag("a", {"href": f"/runs/{started.slug}"}, started.slug)
            self.started.show(tag("p", {"class": "good"}, say("The run has started: "), link))
            timer.cancel()
        elif failure := started.failure:
            self.started.show(tag("pre", {"role": "alert"}, failure))
            timer.cancel()


def add_page(state: WebState) -> None:
    """Register the workshop at `/workshop`, and find the answer that it shows first."""
    app.on_startup(lambda: background_tasks.create(run.io_bound(DESK.answer, PlanInputs())))

    @ui.page("/workshop")
    def workshop() -> None:
        with page_frame(say("Workshop"), active="/workshop"):
            lead = say(
                "Choose a model and a cluster, and see at once which plan is best, what it needs and how fast it is."
            )
            Markup(tag("div", None, tag("h1", None, say("Workshop")), tag("p", {"class": "quiet"}, lead)))
            page = Workshop(state, current_language())
            page.build()
            ui.timer(0.01, lambda: page.ask(page.inputs), once=True)

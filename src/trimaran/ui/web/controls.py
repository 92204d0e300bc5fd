"""Controls of a page: the browser's own elements with a label, and a function that gets each new value.

The value of an element is sent by `web.js`, which puts it on the event. The browser keeps what the user enters: only
the first value is set from here.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import cast

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from trimaran.core import show_bytes, show_count
from trimaran.ui.language import say
from trimaran.ui.viz.figures import Control

OnText = Callable[[str], Awaitable[None] | None]
OnClick = Callable[[], Awaitable[None] | None]
TYPING_SECONDS = 0.25  # between two messages while the user types or drags


def text_field(
    label: str, on_change: OnText, *, value: str = "", hint: str = "", is_search: bool = False
) -> ui.element:
    """Add a field for text; `on_change` is called while the user types."""
    kind = "search" if is_search else "text"
    with _labelled(label):
        field = _element("input", type=kind, defaultValue=value, placeholder=hint,
                         autocomplete="off", spellcheck="false")  # fmt: skip
        field.props["aria-label"] = label
    return field.on("input", _with_value(on_change), ["value"], throttle=TYPING_SECONDS, leading_events=False)


def choice(label: str, options: Mapping[str, str], on_change: OnText, *, value: str = "") -> ui.element:
    def chosen(text: str) -> Awaitable[None] | None:
        return on_change(text) if text in options else None  # a browser can send anything

    with _labelled(label):
        field = ui.element("select")
        field.props["aria-label"] = label
        with field:
            for each, shown in options.items():
                option = TextElement(tag="option", text=shown)
                option.props["value"], option.props["selected"] = each, each == value
    return field.on("change", _with_value(chosen), ["value"])


def slider(label: str, values: Sequence[str], on_change: OnText, *, value: str) -> ui.element:
    """Add a slider over `values`, in their order; `on_change` is called while it is dragged."""
    at = values.index(value) if value in values else 0
    with _labelled(label):
        shown = TextElement(tag="output", text=values[at])
        # The type and the range come first: a browser would cut the value to those that it assumes.
        field = _element("input", type="range", min=0, max=len(values) - 1, step=1, defaultValue=str(at))
        field.props["aria-label"], field.props["aria-valuetext"] = label, values[at]

    def changed(text: str) -> Awaitable[None] | None:
        if not text.isdecimal() or int(text) >= len(values):
            return None
        chosen = values[int(text)]
        shown.text = chosen
        field.props["aria-valuetext"] = chosen
        return on_change(chosen)

    return field.on("input", _with_value(changed), ["value"], throttle=TYPING_SECONDS)


def button(text: str, on_click: OnClick, *, is_main: bool = False) -> ui.element:
    field = TextElement(tag="button", text=text).classes("main" if is_main else "plain")
    field.props["type"] = "button"
    return field.on("click", lambda _: on_click(), [])


class Chips:
    """Buttons in a row, some of which are pressed: one of several views, or the runs that are chosen."""

    def __init__(
        self, names: Mapping[str, str], on_click: OnText, *, pressed: Collection[str] = (), prefix: str = ""
    ) -> None:
        self._chips = {name: button(text, partial(on_click, name)) for name, text in names.items()}
        for name, chip in self._chips.items() if prefix else ():
            chip.props["id"] = f"{prefix}{name}"
        self.press(*pressed)

    def press(self, *pressed: str) -> None:
        for name, chip in self._chips.items():
            is_pressed = str(name in pressed).lower()
            if chip.props.get("aria-pressed") != is_pressed:
                chip.props["aria-pressed"] = is_pressed


def show_age(seconds: float) -> str:
    if seconds < 60:
        return say("{count} s ago", count=max(0, int(seconds)))
    if seconds < 3600:
        return say("{count} min ago", count=int(seconds // 60))
    if seconds < 86400:
        return say("{count} h ago", count=int(seconds // 3600))
    return say("{count} days ago", count=int(seconds // 86400))


def _element(tag: str, **props: object) -> ui.element:
    element = ui.element(tag)
    for name, value in props.items():
        element.props[name] = value
    return element


def _labelled(label: str) -> ui.element:
    """Return a label element; the control is added inside it."""
    outer = ui.element("label").classes("control")
    with outer:
        TextElement(tag="span", text=label)
    return outer


def _with_value(on_change: OnText) -> Callable[[GenericEventArguments], Awaitable[None] | None]:
    def handle(event: GenericEventArguments) -> Awaitable[None] | None:
        return on_change(str(event.args.get("value", ""))) if isinstance(event.args, dict) else None

    return handle


OnChange = Callable[[str, str], Awaitable[None]]
MAX_WHOLE = 130  # values of a slider over whole numbers


def add_control(control: Control, on_change: OnChange) -> None:
    """Add the control to the page; `on_change` gets its name and the value as `--with` takes it."""
    label = say(control.label)
    if control.kind == "choice":
        options = {each: say(each) for each in control.options}
        choice(label, options, lambda value: on_change(control.name, value), value=str(control.value))
        return
    values = slider_values(control)
    now = show_setting(control, float(control.value))
    slider(label, list(values), lambda shown: on_change(control.name, values[shown]), value=now)


def slider_values(control: Control) -> Mapping[str, str]:
    """Return the values of a slider: what is shown for each, and what `--with` takes. The present one is among them."""
    least, most, now = (cast("float", each) for each in (control.least, control.most, control.value))
    found = _log_values(least, most, whole=control.step == 1) if control.log else _even_values(control)
    found = sorted({*found, now})
    return {show_setting(control, each): f"{each:.12g}" for each in found}


def show_setting(control: Control, value: float) -> str:
    if control.name == "bytes":
        return show_bytes(value)
    return show_count(value) if abs(value) >= 1e5 else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _even_values(control: Control) -> list[float]:
    least, most = cast("float", control.least), cast("float", control.most)
    if control.step == 1 and most - least < MAX_WHOLE:
        return [float(each) for each in range(round(least), round(most) + 1)]
    fiftieth = (most - least) / 50
    power = 10.0 ** math.floor(math.log10(fiftieth))
    step = power * next(each for each in (1, 2, 5, 10) if each * power >= fiftieth * 0.999)
    if control.step == 1:
        step = max(1.0, round(step))
    inside = [each * step for each in range(math.ceil(least / step), math.floor(most / step) + 1)]
    return [least, *inside, most]


def _log_values(least: float, most: float, *, whole: bool) -> list[float]:
    """Return round values from the least to the most: powers of two of whole numbers; else 1, 2 and 5 times powers."""
    low = max(least, most * 1e-18)
    if whole:
        powers = range(math.floor(math.log2(low)), math.floor(math.log2(most)) + 1)
        return [each for power in powers for each in (2.0**power, 1.5 * 2.0**power)
                if least <= each <= most and each == round(each)]  # fmt: skip
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(most)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [each for each in found if least <= each <= most]

"""Controls of a page: the browser's own elements with a label, and a function that gets each new value.

The value of an element is sent by `web.js`, which puts it on the event. The browser keeps what the user enters: only
the first value is set from here.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from trimaran.ui.web.language import say

OnText = Callable[[str], Awaitable[None] | None]
OnClick = Callable[[], Awaitable[None] | None]
TYPING_SECONDS = 0.25  # between two messages while the user types or drags


def text_field(
    label: str,
    on_change: OnText,
    *,
    value: str = "",
    hint: str = "",
    is_search: bool = False,
    is_secret: bool = False,
) -> ui.element:
    """Add a field for text; `on_change` is called while the user types. A secret is not shown."""
    kind = "search" if is_search else "password" if is_secret else "text"
    with _labelled(label):
        field = _element("input", type=kind, defaultValue=value, placeholder=hint,
                         autocomplete="off", spellcheck="false")  # fmt: skip
        field.props["aria-label"] = label
    return field.on("input", _with_value(on_change), ["value"], throttle=TYPING_SECONDS, leading_events=False)


def choice(label: str, options: Mapping[str, str], on_change: OnText, *, value: str = "") -> ui.element:
    """Add a list of options to choose one from; `options` are values and what is shown for each."""

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
    """Add a button."""
    field = TextElement(tag="button", text=text).classes("main" if is_main else "plain")
    field.props["type"] = "button"
    return field.on("click", lambda _: on_click(), [])


def show_age(seconds: float) -> str:
    """Return how long ago something was."""
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

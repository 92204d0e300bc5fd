"""The controls of a view on the web page: each is a slider or a list."""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from trimaran.core import show_bytes, show_count
from trimaran.ui.viz.figures import Control
from trimaran.ui.web.controls import choice, slider
from trimaran.ui.web.language import say

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
    """Return a value in few letters."""
    if control.name == "bytes":
        return show_bytes(value)
    return show_count(value) if abs(value) >= 1e5 else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _even_values(control: Control) -> list[float]:
    least, most = cast("float", control.least), cast("float", control.most)
    if control.step == 1 and most - least < MAX_WHOLE:
        return [float(each) for each in range(round(least), round(most) + 1)]
    step = _round_step((most - least) / 50)
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


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(each for each in (1, 2, 5, 10) if each * power >= least * 0.999)

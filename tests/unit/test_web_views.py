"""The controls and the subjects of the views on the web page, without a browser."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("nicegui")

from trimaran.core import UserError
from trimaran.ui import (
    SHORT_NAMES,
    Control,
    RunsRoot,
    Subject,
    SubjectCache,
    SubjectName,
    build_view,
    read_subject,
    slider_values,
)


@pytest.fixture(scope="module")
def small() -> Subject:
    return read_subject("llama-3.2-1b", None, "8xH100", (), ())


@pytest.mark.parametrize("name", [name for name in SHORT_NAMES if name != "strategies"])
def test_a_view_answers_at_both_ends_of_every_control(small: Subject, name: str) -> None:
    for control in build_view(name, small).controls:
        values = list(slider_values(control).values()) if control.kind == "number" else list(control.options)
        for value in {values[0], values[-1]}:
            view = build_view(name, replace(small, settings={control.name: value}))
            assert set(view.modes) == {"explain", "simulate"}
            assert all(mode.sentences or mode.figures or mode.formulas for mode in view.modes.values())
            (again,) = (each for each in view.controls if each.name == control.name)
            assert str(again.value) == value if control.kind == "choice" else again.value == pytest.approx(float(value))


def test_sliders_have_round_values_in_order_and_the_present_one() -> None:
    control = Control(name="ranks", label="ranks", kind="number", value=12.0, least=1, most=64, step=1.0, log=True)
    values = slider_values(control)
    assert list(values) == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "32", "48", "64"]
    control = Control(name="bytes", label="bytes", kind="number", value=2.0**28, least=1, most=1e13, log=True)
    values = slider_values(control)
    assert values["256.0 MiB"] == "268435456"
    numbers = [float(each) for each in values.values()]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (1.0, 1e13)


@pytest.mark.parametrize(("plan", "cluster"), [("../../etc/passwd", ""), ("/etc/passwd", ""), ("tiny", "../a.yaml"),
                                               ("tiny", "a.yaml"), ("recipes/stdlib-tiny.yaml", "")])  # fmt: skip
def test_an_address_names_no_path(plan: str, cluster: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="V005"):
        SubjectCache(RunsRoot(tmp_path)).read(SubjectName(plan=plan, cluster=cluster))


def test_a_run_is_opened_by_its_name_only(tmp_path: Path) -> None:
    for name in ("../x", "/etc", "a/b", ".."):
        with pytest.raises(UserError, match="W003"):
            SubjectCache(RunsRoot(tmp_path)).read(SubjectName(run=name))

"""The panel of a run, and the summary at its end."""

import io
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from tests.runs import finished_run, new_run, start_ranks, step_metrics
from trimaran.app import (
    CleanConsole,
    RunState,
    difference,
    draw,
    explain_failure,
    follow,
    line,
    next_commands,
    summarise,
)
from trimaran.core import AdapterSection, UserError
from trimaran.runs import AttemptLog, Journal, RunDirectory, replace_recipe


def state_of(run: RunDirectory) -> RunState:
    state = RunState(run)
    state.refresh()
    return state


def console_of(*, width: int = 80, terminal: bool = False) -> Console:
    return CleanConsole(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def text_of(renderable: RenderableType, *, width: int = 80) -> str:
    console = console_of(width=width)
    console.print(renderable)
    return printed(console)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_panel_fits_its_width_and_shows_everything(tmp_path: Path, width: int) -> None:
    text = text_of(draw(state_of(finished_run(tmp_path / "run")), width=width), width=width)
    assert {len(row) for row in text.splitlines()} == {width}
    for word in ("toy done", "step 10 / 10", "first 5.000", "best 0.500", "0.625", "2.0k", "110.0 MiB", "backward"):
        assert word in text


def test_the_panel_fits_a_terminal_of_24_rows(tmp_path: Path) -> None:
    assert len(text_of(draw(state_of(finished_run(tmp_path / "run")), width=80)).splitlines()) < 24


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_panel_shows_exposed_communication_by_axis(tmp_path: Path, width: int) -> None:
    run = finished_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        details = {"comm_seconds": {"dp_replicate": 0.1, "tp": None, "world": 0.025}}
        journal.step(replace(step_metrics(11, loss=1.0), details=details))
    text = text_of(draw(state_of(run), width=width), width=width)
    assert {len(row) for row in text.splitlines()} == {width}
    assert "comm by axis  dp_replicate 20%" in text
    assert width < 80 or len(text.splitlines()) < 24
    assert width < 200 or "tp not measured" in text


def test_the_panel_compares_measured_and_predicted(tmp_path: Path) -> None:
    text = text_of(draw(state_of(finished_run(tmp_path / "run")), width=80))
    (row,) = [row for row in text.splitlines() if "peak memory" in row]
    assert row.split()[3:-1] == ["100.0", "MiB", "110.0", "MiB", "+10%", "✓", "±30%"]


def test_a_difference_beyond_the_error_bar_is_marked_without_colour() -> None:
    assert difference(1.2, 1.0, error=0.3).plain == "+20% ✓"
    assert difference(2.0, 1.0, error=0.3).plain == "+100% !"
    assert difference(2.0, 0.0, error=0.3).plain == "-"


def test_a_nan_loss_is_shown_and_left_out_of_the_curve(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=math.nan))
        assert "best nan" in text_of(draw(state_of(run), width=80))
        for step, loss in ((2, 3.0), (3, 2.0), (4, math.inf)):
            journal.step(step_metrics(step, loss=loss))
    assert "loss nan   first nan   best 2.000" in text_of(draw(state_of(run), width=80))


def test_a_starting_run_shows_what_it_waits_for(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert "starting 2 ranks" in text_of(draw(state_of(run), width=80))
    start_ranks(run)
    assert "2 of 2 ranks ready" in line(state_of(run))


def test_without_a_terminal_the_run_is_plain_lines(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    run.log(1).write_text("a line of [bold]rank one[/bold] :smile:\n")
    console = console_of()
    follow(RunState(run), console, has_ended=lambda: True)
    text = printed(console)
    assert "\x1b" not in text
    assert "[rank 1] a line of [bold]rank one[/bold] :smile:\n" in text
    assert "step 10  held-out loss 0.6250\n" in text
    assert "step 10/10  loss 0.5000  2.0k tokens/s  lr 1.00e-03  grad norm 0.75  110.0 MiB\n" in text


def test_plain_lines_show_the_first_and_the_last_step_and_few_between(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", steps=3)
    steps = iter(range(1, 4))
    with Journal(run, 0) as journal:

        def has_ended() -> bool:
            step = next(steps)
            journal.step(step_metrics(step, loss=1.0))
            return step == 3

        console = console_of()
        follow(RunState(run), console, has_ended=has_ended)
    assert [row.split()[1] for row in printed(console).splitlines()] == ["1/3", "3/3"]


def test_on_a_terminal_the_panel_is_drawn_below_the_log(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    run.log(0).write_text("a warning\n")
    console = console_of(terminal=True)
    follow(RunState(run), console, has_ended=lambda: True)
    text = printed(console)
    assert text.index("a warning") < text.index("toy")
    assert "step 10 / 10" in text


def test_the_summary_shows_the_result_and_the_generated_text(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", text="def \x1b[2Jfirst(self):\n\treturn [1]")
    console = console_of(width=200)
    summarise(state_of(run), console)
    text = printed(console)
    assert "\x1b" not in text
    assert "def first(self):" in text
    assert "return [1]" in text
    assert "loss 5.0000 -> 0.5000 (held out 0.6250) in 10 steps and 12.0 s" in text
    assert f"run   {run.path}" in text


def test_the_summary_compares_predicted_and_measured(tmp_path: Path) -> None:
    console = console_of(width=200)
    summarise(state_of(finished_run(tmp_path / "run")), console)
    assert "500 ms a step, 110.0 MiB a rank\n" in printed(console)
    assert "predicted 500 ms a step (+0% ✓), 100.0 MiB a rank (+10% ✓)\n" in printed(console)


def test_the_summary_says_of_how_many_answers_an_accuracy_is_and_what_ended_the_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        counts = {"tokens": 1200.0, "answers": 2.0}
        journal.event("evaluation", step=10, loss=0.5, accuracy={"tokens": 0.9, "answers": 1.0}, accuracy_counts=counts)
    recipe = run.read_recipe()
    replace_recipe(run, recipe.model_copy(update={"data": recipe.data.model_copy(update={"epochs": 3.0})}))
    console = console_of(width=200)
    summarise(state_of(run), console)
    shown = printed(console)
    assert "accuracy on held-out data: tokens 90.0% of 1,200, answers 100.0% of 2\n" in shown
    assert "ended by data.epochs 3 or train.steps 10, whichever came first; to train longer, resume with" in shown


def test_the_next_commands_are_ready_to_type(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "my run")
    commands = [shlex.split(command) for command in next_commands(state_of(run))]
    assert commands == [
        ["trimaran", "generate", str(run.path), "--prompt", "class "],
        ["trimaran", "resume", str(run.path), "--set", "train.steps=20"],
        ["trimaran", "report", str(run.path)],
    ]


def test_a_run_with_an_adapter_says_where_it_is_and_how_to_merge_it(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    recipe = run.read_recipe()
    model = recipe.model.model_copy(update={"adapter": AdapterSection()})
    replace_recipe(run, recipe.model_copy(update={"model": model}))
    console = console_of(width=200)
    summarise(state_of(run), console)
    assert f"{run.model} holds the adapter (lora of rank 16) in PEFT's format, without the base" in printed(console)
    assert f"trimaran export {run.path} --merge" in next_commands(state_of(run))


def test_the_first_next_command_of_a_stopped_run_is_resume(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    AttemptLog(run).over(75, "asked to end before anything was started")
    state = state_of(run)
    assert (state.status, next_commands(state)[0]) == ("stopped", f"trimaran resume {run.path}")


def test_without_saved_weights_no_text_is_offered(tmp_path: Path) -> None:
    commands = next_commands(state_of(new_run(tmp_path / "run")))
    assert len(commands) == 3
    assert not any("generate" in command for command in commands)


def test_a_user_error_of_a_rank_is_raised_here(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 1) as journal:
        journal.event("error", code="T030", what="too many tokens", where="data.tokenizer", fix="use another")
    with pytest.raises(UserError, match="T030: too many tokens"):
        explain_failure(state_of(run), console_of())


def test_a_fault_shows_the_last_log_lines_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 1) as journal:
        journal.event("error", type="RuntimeError", message="out of luck")
    run.log(0).write_text("connection closed by peer\n")
    run.log(1).write_text("".join(f"line {number}\n" for number in range(30)))
    console = console_of()
    assert explain_failure(state_of(run), console) == 1
    text = printed(console)
    assert "failed  RuntimeError: out of luck" in text
    assert "line 15" in text
    assert "line 14" not in text
    assert "connection closed" not in text
    assert f"log   {run.log(1)}" in text


def test_a_rank_that_died_without_an_event_is_found_by_its_traceback(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.log(1).write_text("Traceback (most recent call last):\nImportError: no\n")
    console = console_of()
    explain_failure(state_of(run), console)
    assert "last log lines of rank 1" in printed(console)


def test_without_a_traceback_the_launcher_log_is_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.agent_log.write_text("Signal 9 (SIGKILL) received by PID 1\n")
    console = console_of()
    explain_failure(state_of(run), console)
    assert "SIGKILL" in printed(console)
    assert str(run.agent_log) in printed(console)


def test_if_the_rank_has_no_log_the_launcher_log_is_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.log(1).unlink(missing_ok=True)
    run.agent_log.write_text("NotADirectoryError: '/dev/null/cache'\n")
    with Journal(run, 1) as journal:
        journal.event("error", type="HostLost", message="the process that forks the ranks ended")
    console = console_of()
    explain_failure(state_of(run), console)
    assert "last log lines of the launcher" in printed(console)
    assert "NotADirectoryError" in printed(console)

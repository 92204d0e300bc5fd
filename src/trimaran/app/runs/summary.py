"""Prints the result of a run: its numbers, its directory, and commands to try next."""

import re
import shlex
import signal

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.live import print_plain
from trimaran.app.runs.run_prompt import generate_command
from trimaran.app.runs.run_state import RunState, accuracy_texts
from trimaran.app.runs.run_view import difference
from trimaran.app.runs.status_lines import loss_bound_text, store_summary, unread_texts
from trimaran.app.show.terminal import tail
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.checkpoint import complete_steps
from trimaran.core import UserError, show_bytes, show_count, show_seconds

MAX_LOG_LINES = 15
UNDECODABLE = "\ufffd"
MAX_UNDECODABLE = 0.2  # of the characters of a sample; a text with more is noise
COMPARED = (("step_seconds", show_seconds, "a step"), ("peak_bytes", show_bytes, "a rank"))
PEER_IS_GONE = ("closed by peer", "reset by peer")  # the error of a rank if another one has died


def summarise(state: RunState, console: Console) -> None:
    """Print the result of a run that is done or was stopped."""
    _show_samples(state, console)
    console.print(Rule(style="dim"))
    if state.steps and (measured := state.measured):
        text = Text.assemble((state.status, f"bold {GREEN}" if state.status == "done" else "bold"), "  loss ")
        text.append_text(Text.assemble(f"{state.first_loss:.4f} -> ", (f"{state.steps[-1].loss:.4f}", "bold")))
        if state.evaluations:
            text.append(f" (held out {state.evaluations[-1][1]:.4f})")
        text.append(f" in {state.step} steps")
        if done := next((event for event in state.current_events("done") if event.rank == 0), None):
            text.append(f" and {show_seconds(done.data['seconds'])}")
        console.print(text, soft_wrap=True)
        if state.accuracy:
            accuracy = ", ".join(accuracy_texts(state.accuracy, state.accuracy_counts))
            console.print(Text.assemble("      accuracy on held-out data: ", (accuracy, "bold")), soft_wrap=True)
        speed = f"{show_count(measured.tokens_per_second)} {state.unit}/s, {show_seconds(measured.step_seconds)} a step"
        print_plain(console, f"      {speed}, {show_bytes(measured.peak_bytes)} a rank")
        _compare(state, console)
        incidents = [incident for incident in state.incidents if incident.cause != "preempted"]
        if incidents or state.restarts:
            lost = round(sum(incident.cost.get("lost_steps", 0) for incident in incidents))
            counts = {"incident": len(incidents), "restart": state.restarts, "lost step": lost}
            parts = [f"{number} {noun}{'' if number == 1 else 's'}" for noun, number in counts.items()]
            if ledger := state.ledger:
                parts.append(f"goodput {ledger.goodput:.1%} of {show_seconds(ledger.at_work)}")
            print_plain(console, f"      {', '.join(parts)}")
            for incident in incidents:
                if incident.cause == "storage":
                    print_plain(console, f"      {incident.what}")
        unfinished = (event.data for event in state.current_events("unfinished"))
        for what, why in {str(data.get("what")): str(data.get("why")) for data in unfinished}.items():
            print_plain(console, f"      warning: training is done and saved, but not the {what}: {why}")
        if state.status == "done" and (epochs := state.recipe.data.epochs):
            ends = f"data.epochs {epochs:g} or train.steps {state.recipe.train.steps}, whichever came first"
            print_plain(console, f"      ended by {ends}; to train longer, resume with a larger one")
        if bound := loss_bound_text(state.loss_bound, total_steps=state.recipe.train.steps):
            print_plain(console, f"      {bound}")
        for name, detail in state.details:
            print_plain(console, f"      {name.replace('_', ' ')}: {detail}")
    elif not state.steps:
        console.print(Text.assemble((state.status, "bold"), "  before the first step"), soft_wrap=True)
    print_plain(console, f"run   {state.run.path}")
    for text in unread_texts(state):
        print_plain(console, f"      {text}")
    # Print that there are none, or that they are also in the object store.
    if stored := store_summary(state):
        print_plain(console, f"      {stored}")
    if state.recipe.checkpoint.is_off:
        print_plain(
            console, "      no checkpoint was written (checkpoint.every: off): a resume starts from the first step"
        )
    if (adapter := state.recipe.model.adapter) is not None and state.events_of_kind("saved"):
        form = f"({adapter.kind} of rank {adapter.rank}) in PEFT's format, without the base"
        print_plain(console, f"      {state.run.model} holds the adapter {form}")
        print_plain(console, f"      for that of another step: {program_name()} export RUN --step N")
    for label, command in zip(("next", "", ""), next_commands(state), strict=True):
        console.print(Text.assemble(f"{label:6}", (command, "bold")), soft_wrap=True)


def _show_samples(state: RunState, console: Console) -> None:
    """Print the text that the model generated last: a resumed run has several."""
    samples = state.events_of_kind("sample")
    if samples:
        console.print(Rule(Text("generated by the model", style="dim"), style="dim"))
    for data in (event.data for event in samples if event.step == samples[-1].step and "text" in event.data):
        if not data.keys() >= {"expected", "prompt", "right"}:
            print_plain(console, readable_sample(data["text"]).rstrip())
            if isinstance(data.get("cut_short"), str):
                console.print(Text(f"(cut short: {data['cut_short']})", style="dim"), soft_wrap=True)
            continue
        answer, expected = data["text"], data["expected"]
        text = Text.assemble(f"{data['prompt']}  ", (answer, GREEN if data["right"] else RED))
        console.print(text if data["right"] else text.append(f"  (right: {expected})", "dim"), soft_wrap=True)


def readable_sample(text: str) -> str:
    """Return `text` with each run of undecodable bytes as one character, or a remark if most of it is undecodable."""
    num_bad = text.count(UNDECODABLE)
    if num_bad > len(text) * MAX_UNDECODABLE:
        return f"({num_bad} of {len(text)} characters cannot be decoded, so that the text is not shown)"
    return re.sub(f"{UNDECODABLE}+", UNDECODABLE, text)


def _compare(state: RunState, console: Console) -> None:
    """Print the prediction and its error: with a tick if it is within its own error bar."""
    if (predicted := state.plan.prediction) is None or (measured := state.measured) is None:
        return
    text = Text("      predicted ")
    for (name, show, unit), separator in zip(COMPARED, ("", ", "), strict=True):
        before, after = getattr(predicted, name), getattr(measured, name)
        text.append_text(Text.assemble(separator, show(before), f" {unit} ("))
        text.append_text(difference(after, before, error=predicted.error_of(name))).append(")")
    console.print(text, soft_wrap=True)


def next_commands(state: RunState) -> list[str]:
    """Return three commands to try next, ready to type; the run's recipe contains every setting."""
    program, run, recipe = program_name(), path_argument(state.run.path), path_argument(state.run.recipe)
    longer = ["--set", f"train.steps={2 * state.recipe.train.steps}"] if state.status == "done" else []
    commands = [[program, "resume", run, *longer], [program, "report", run]]
    generate = generate_command(state.recipe, run)
    if state.status == "done" and state.events_of_kind("saved") and generate:
        commands.insert(0, generate)
        if state.recipe.model.adapter is not None:
            commands.insert(1, [program, "export", run, "--merge"])
    else:
        commands.append([program, "plan", recipe])
    return [shlex.join(command) for command in commands[:3]]


def explain_failure(state: RunState, console: Console, code: int = 1) -> int:
    """Print why the run failed and return `code`; a rank's UserError is raised here.

    The reason is the text of the last incident or, without a supervisor, the error of the rank that failed first.
    """
    failure = state.failure
    if failure is not None and "code" in failure.data:
        data = failure.data
        raise UserError(data["code"], data["what"], where=data["where"], fix=data["fix"])
    what = f"{failure.data.get('type')}: {failure.data.get('message')}" if failure else "the ranks left no error"
    # A killed process writes no event, but its log ends with a crash.
    marks, ranks = ("Traceback", "Fatal Python error", "Segmentation fault"), range(state.plan.mesh.world_size)
    crashed = (rank for rank in ranks if any(mark in text for text in tail(state.run.log(rank), 200) for mark in marks))
    rank = failure.rank if failure else next(crashed, None)
    if (silent := state.silent_ranks) and any(word in what for word in PEER_IS_GONE):
        rank, what = silent[0], f"rank {silent[0]} died without an error: it was killed, or crashed in native code"
    if code < 0 or (state.status == "vanished" and state.attempts.attempts):
        name = f" by {signal.Signals(-code).name}" if code < 0 else ""
        what, rank, code = f"the supervisor was killed{name}, and the ranks with it", None, 1
    if (incidents := state.incidents) and incidents[-1].action == "stopped":
        what, rank = state.attempts.why, next(iter(incidents[-1].suspects), rank)
    log = state.run.agent_log if rank is None else state.run.log(rank)
    log = log if log.exists() else state.run.agent_log
    source = "the launcher" if log == state.run.agent_log else f"rank {rank}"
    console.print(Text.assemble(("failed", f"bold {RED}"), f"  {what}"), soft_wrap=True)
    if lines := tail(log, MAX_LOG_LINES):
        console.print(Rule(Text(f"last log lines of {source}", style="dim"), style="dim"))
        print_plain(console, "\n".join(lines))
        console.print(Rule(style="dim"))
    print_plain(console, f"log   {log}")
    print_plain(console, f"run   {state.run.path}")
    if state.status == "vanished" and complete_steps(state.run.checkpoints):
        console.print(Text.assemble("next  ", (next_commands(state)[0], "bold")), soft_wrap=True)
    return code

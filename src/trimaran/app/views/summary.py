"""What is said when a run has ended: what came out, where it is, and what to try next."""

import shlex
import signal
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from trimaran.app.request.options import own_name, typed
from trimaran.app.views.live import print_plain
from trimaran.app.views.logs import printable, tail
from trimaran.app.views.run_state import RunState
from trimaran.app.views.run_view import difference
from trimaran.app.views.text_chart import GREEN, RED
from trimaran.checkpoint.step_dirs import steps
from trimaran.core import UserError, show_bytes, show_count, show_seconds

LAST_WORDS = 15
COMPARED = (("step_seconds", show_seconds, "a step"), ("peak_bytes", show_bytes, "a rank"))
PEER_IS_GONE = ("closed by peer", "reset by peer")  # what a rank says when another one has died


def summarise(state: RunState, console: Console) -> None:
    """Print the result of a run that ended well or was stopped."""
    _written(state, console)
    console.print(Rule(style="dim"))
    if state.steps and (measured := state.measured):
        words = Text.assemble((state.status, f"bold {GREEN}" if state.status == "done" else "bold"), "  loss ")
        words.append_text(Text.assemble(f"{state.losses[0]:.4f} -> ", (f"{state.losses[-1]:.4f}", "bold")))
        if state.evaluations:
            words.append(f" (held out {state.evaluations[-1][1]:.4f})")
        words.append(f" in {state.step} steps")
        if done := next((event for event in state.now("done") if event.rank == 0), None):
            words.append(f" and {show_seconds(done.data['seconds'])}")
        console.print(words, soft_wrap=True)
        if right := state.accuracy:
            told = ", ".join(f"{name} {share:.1%}" for name, share in right.items())
            console.print(Text.assemble("      right on held-out data: ", (told, "bold")), soft_wrap=True)
        pace = f"{show_count(measured.tokens_per_second)} {state.unit}/s, {show_seconds(measured.step_seconds)} a step"
        print_plain(console, f"      {pace}, {show_bytes(measured.peak_bytes)} a rank")
        _compare(state, console)
        _faults(state, console)
        for name, words in state.details:
            print_plain(console, f"      {name.replace('_', ' ')}: {words}")
    elif not state.steps:
        console.print(Text.assemble((state.status, "bold"), "  before the first step"), soft_wrap=True)
    print_plain(console, f"run   {state.run.path}")
    for label, command in zip(("next", "", ""), next_commands(state), strict=True):
        console.print(Text.assemble(f"{label:6}", (command, "bold")), soft_wrap=True)


def _written(state: RunState, console: Console) -> None:
    """Print what the model wrote when it was last asked: a run that was resumed has more of it."""
    samples = state.of_kind("sample")
    if samples:
        console.print(Rule(Text("written by the model", style="dim"), style="dim"))
    for data in (event.data for event in samples if event.step == samples[-1].step):
        if "expected" not in data:
            print_plain(console, printable(data["text"]).rstrip())
            continue
        said, expected = printable(data["text"]), printable(data["expected"])
        words = Text.assemble(f"{printable(data['prompt'])}  ", (said, GREEN if data["right"] else RED))
        console.print(words if data["right"] else words.append(f"  (right: {expected})", "dim"), soft_wrap=True)


def _compare(state: RunState, console: Console) -> None:
    """Print what was predicted, and how far off that was: a tick where it is within its own error bar."""
    if (predicted := state.plan.prediction) is None or (measured := state.measured) is None:
        return
    words = Text("      predicted ")
    for (name, show, unit), link in zip(COMPARED, ("", ", "), strict=True):
        before, after = getattr(predicted, name), getattr(measured, name)
        words.append_text(Text.assemble(link, show(before), f" {unit} ("))
        words.append_text(difference(after, before, error=predicted.error)).append(")")
    console.print(words, soft_wrap=True)


def _faults(state: RunState, console: Console) -> None:
    """Print what went wrong on the way and what it cost, if anything did."""
    incidents = [incident for incident in state.incidents if incident.cause != "preempted"]
    if not incidents and not state.restarts:
        return
    lost = round(sum(incident.cost.get("lost_steps", 0) for incident in incidents))
    counts = {"incident": len(incidents), "restart": state.restarts, "lost step": lost}
    words = [f"{number} {noun}{'' if number == 1 else 's'}" for noun, number in counts.items()]
    if ledger := state.ledger:
        words.append(f"goodput {ledger.goodput:.1%} of {show_seconds(ledger.at_work)}")
    print_plain(console, f"      {', '.join(words)}")


def next_commands(state: RunState) -> list[str]:
    """Return three commands that work from here, as they are typed; the run's own recipe has every setting in it."""
    us, run, recipe = own_name(), typed(state.run.path), typed(state.run.recipe)
    longer = ["--set", f"train.steps={2 * state.recipe.train.steps}"] if state.status == "done" else []
    commands = [[us, "resume", run, *longer], [us, "watch", run]]
    if state.status == "done" and state.of_kind("saved") and state.recipe.model.family in ("decoder", "hf"):
        commands.insert(0, [us, "generate", run, "--prompt", "class "])
    else:
        commands.append([us, "plan", recipe])
    return [shlex.join(command) for command in commands[:3]]


def explain_failure(state: RunState, console: Console, code: int = 1) -> int:
    """Print why the run failed and return `code`; a rank's UserError is raised as ours.

    That is the verdict of the last incident or, where nobody supervised, the last words of the rank that failed first.
    """
    failure = state.failure
    if failure is not None and "code" in failure.data:
        data = failure.data
        raise UserError(data["code"], data["what"], where=data["where"], fix=data["fix"])
    what = f"{failure.data.get('type')}: {failure.data.get('message')}" if failure else "the ranks ended without a word"
    rank = failure.rank if failure else next(iter(_crashed(state)), None)
    if (silent := state.silent_ranks) and any(word in what for word in PEER_IS_GONE):
        rank, what = silent[0], f"rank {silent[0]} died without a word: killed, or crashed below Python"
    if code < 0 or (state.status == "vanished" and state.attempts.attempts):
        name = f" by {signal.Signals(-code).name}" if code < 0 else ""
        what, rank, code = f"the supervisor was killed{name}, and the ranks with it", None, 1
    if (incidents := state.incidents) and incidents[-1].action == "stopped":
        what, rank = state.attempts.why, next(iter(incidents[-1].suspects), rank)
    log = _log_of(state, rank)
    who = "the launcher" if log == state.run.agent_log else f"rank {rank}"
    console.print(Text.assemble(("failed", f"bold {RED}"), f"  {what}"), soft_wrap=True)
    if words := tail(log, LAST_WORDS):
        console.print(Rule(Text(f"last words of {who}", style="dim"), style="dim"))
        print_plain(console, "\n".join(words))
        console.print(Rule(style="dim"))
    print_plain(console, f"log   {log}")
    print_plain(console, f"run   {state.run.path}")
    if state.status == "vanished" and steps(state.run.checkpoints):
        console.print(Text.assemble("next  ", (next_commands(state)[0], "bold")), soft_wrap=True)
    return code


def _log_of(state: RunState, rank: int | None) -> Path:
    """Return where the rank's last words are: the launcher's log, where the rank never came as far as its own."""
    named = state.run.agent_log if rank is None else state.run.log(rank)
    return named if named.exists() else state.run.agent_log


def _crashed(state: RunState) -> list[int]:
    """Return the ranks whose log ends in a crash; a process that was killed leaves no event."""
    marks = ("Traceback", "Fatal Python error", "Segmentation fault")
    ranks = range(state.plan.mesh.world_size)
    return [rank for rank in ranks if any(mark in text for text in tail(state.run.log(rank), 200) for mark in marks)]

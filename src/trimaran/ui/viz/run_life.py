"""The life of a run: plan, launch, init, train, save, incident, adapt; and the files that start it on each target."""

from trimaran.core import UserError
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import (
    FileText,
    GraphArrow,
    GraphNode,
    Mode,
    ModeName,
    NodeGraph,
    Span,
    Table,
    Timeline,
    as_modes,
    plain_bars,
    show_duration,
)
from trimaran.ui.viz.subject import Controls, RunLife, Subject

NAME = "AccelerateWorkflowVisualizer"
TITLE = "The life of a run"
QUESTION = "What happens to a run from its plan to its end, where is it now, and which files start it on each target?"
PHASES = ("plan", "launch", "init", "train", "save", "incident", "adapt")
MEANINGS = {
    "plan": ("the planner splits the model and predicts memory and time", "plan.json", "trimaran plan"),
    "launch": ("files are written, and the target starts a supervisor on each node", "launch/", "trimaran launch"),
    "init": ("ranks start, meet, build the network and load weights and data", "events/rank-0.jsonl", "trimaran watch"),
    "train": ("steps, each measured in the prediction's terms", "metrics.jsonl", "trimaran watch"),
    "save": ("checkpoints are written, verified and pruned", "checkpoints/", "trimaran checkpoints"),
    "incident": ("a rank died, hung or computed a NaN; the supervisor finds out which and starts again",
                 "incidents.jsonl", "trimaran incidents"),
    "adapt": ("the autopilot or a person changes the plan of the run", "decisions.jsonl", "trimaran decisions"),
}  # fmt: skip
LOOP = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 3), (3, 5), (5, 2), (3, 6), (6, 3))
PLACES = ((0.08, 0.25), (0.28, 0.25), (0.48, 0.25), (0.68, 0.25), (0.92, 0.25), (0.56, 0.8), (0.8, 0.8))
STATUSES = {
    "starting": "The run is starting.",
    "training": "The run is training.",
    "restarting": "The run is restarting after an incident.",
    "done": "The run is done.",
    "stopped": "The run was stopped. `trimaran resume` continues it.",
    "failed": "The run has failed. `trimaran doctor` says why.",
    "vanished": "The run's process is gone. `trimaran resume` continues it.",
}
NO_TARGET = "none"


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    targets = tuple(subject.launches) or (NO_TARGET,)
    usual = "slurm" if subject.cluster.num_nodes > 1 and "slurm" in targets else targets[0]
    target = controls.choice("target", "where it is launched", usual, targets)
    live = _live(subject.life) if subject.life is not None else None
    nodes = tuple(
        GraphNode(name=phase, x=x, y=y, kind="incident" if phase == "incident" else "phase")
        for phase, (x, y) in zip(PHASES, PLACES, strict=True)
    )
    arrows = tuple(GraphArrow(source=source, target=to) for source, to in LOOP)
    graph = NodeGraph(title="From plan to end", nodes=nodes, arrows=arrows, wide=True)
    title = "What happens in each phase, the file that records it, and the command that shows it"
    rows = tuple((phase, what, as_is(file), as_is(command)) for phase, (what, file, command) in MEANINGS.items())
    table = Table(title, ("phase", "what happens", "file", "command"), rows)
    said: list[str] = []
    files: list[FileText] = []
    if target in subject.launches:
        try:
            launch = subject.launches[target]()
        except UserError as error:
            said.append(say("{target} needs more than is known here: {what}. {fix}", target=target, what=error.what,
                            fix=error.fix))  # fmt: skip
        else:
            files.append(FileText(title=say("The command that writes these files"), content=launch.command))
            names = sorted(launch.files, key=lambda name: name != launch.main)
            files += [FileText(title=say("{target}: {name}", target=target, name=name), content=launch.files[name])
                      for name in names]  # fmt: skip
            files.append(FileText(title=say("To submit them from their folder"), content="\n".join(launch.submit)))
    return as_modes(Mode(sentences=tuple(said), figures=(graph, table, *files)), _simulate(subject), live)


def _simulate(subject: Subject) -> Mode:
    recipe, prediction = subject.question.recipe, subject.prediction
    steps, step = recipe.train.steps, float(prediction.step_seconds)
    parts = {name: seconds * steps for name, seconds in prediction.time.items() if seconds}
    said = (
        say("{steps:,} steps of {step} are predicted to take {total}, give or take {error:.0%}.", steps=steps,
            step=show_duration(step), total=show_duration(steps * step), error=prediction.error),
        say("How often checkpoints are saved: `checkpoint.every` is {every}.", every=recipe.checkpoint.every),
        say("How long launch and init take depends on the target and is not predicted; a run measures it."),
    )  # fmt: skip
    bars = plain_bars("Where the time of all steps should go", "seconds", "all steps", parts)
    return Mode(sentences=said, figures=(bars,))


def _live(life: RunLife) -> Mode:
    said = [
        say(STATUSES.get(life.status, STATUSES["starting"])),
        say("It has done {step:,} of {total:,} steps in {seconds}.", step=life.step, total=life.total_steps,
            seconds=show_duration(life.seconds)),
    ]  # fmt: skip
    used = [phase for phase in PHASES if any(span.phase == phase for span in life.spans)]
    spans = tuple(
        Span(row=used.index(each.phase), start=each.start, end=each.end, label=each.label, kind=each.phase)
        for each in life.spans
    )
    title, x_name = "The run so far", "time since the beginning"
    timeline = Timeline(title=title, unit="seconds", rows=tuple(used), spans=spans, x_name=x_name)
    rows = tuple(
        (each.phase, as_is(show_duration(each.start)), as_is(show_duration(each.end - each.start)), each.label)
        for each in sorted(life.spans, key=lambda each: each.start)
    )
    table = Table("What happened when", ("phase", "since the beginning", "took", ""), rows)
    files = [FileText(title=say("Launched with {name}", name=name), content=content)
             for name, content in life.files.items()]  # fmt: skip
    return Mode(sentences=tuple(said), figures=(timeline, table, *files))

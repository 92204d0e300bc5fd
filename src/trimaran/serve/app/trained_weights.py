"""Which weights `trimaran generate` uses: those of a run, of one of its checkpoints, or of a Hugging Face folder."""

import shlex

from trimaran.app import find_run, path_argument, program_name
from trimaran.checkpoint import STEP_NAME, find_step, newest_step, step_of
from trimaran.core import UserError, expand_user, templated
from trimaran.runs import MARKER, RunDirectory
from trimaran.serve.settings import TrainedWeights

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
STATUS_TEXT = {
    "starting": "it is starting",
    "training": "it is training",
    "restarting": "it is restarting",
    "done": "it is done",
    "stopped": "it was stopped",
    "failed": "it failed",
    "vanished": "its processes are gone",
}


def find_weights(name: str, step: int | None, *, for_text: bool = True) -> TrainedWeights:
    """Return the weights that `name` names: a run, a checkpoint of it, or a Hugging Face folder.

    Of a run these are the newest: the weights that it saved at its end, or a later checkpoint. Raises UserError if
    there are none; with `for_text` also if the model generates no text.
    """
    path = expand_user(name)
    if step is None and STEP_NAME.fullmatch(path.name) and (path.parents[1] / MARKER).is_file():
        return TrainedWeights(path=path, run=find_run(str(path.parents[1])), step=step_of(path))
    is_model = any((path / each).is_file() for each in (CONFIG, ADAPTER_CONFIG))
    if is_model and not (path / MARKER).is_file():
        if step is not None:
            raise UserError("A001.folder-with-weights", where="--step")
        return TrainedWeights(path=path)
    run = find_run(name)
    if for_text and run.read_recipe().model.kind.reads == "scenes":
        raise UserError("A016.perception-model-generates", where=str(run.recipe))
    newest = newest_step(run.checkpoints)
    is_newer = newest is not None
    if step is None and newest is not None and run.model.is_dir():
        saved = saved_step(run)
        is_newer = saved is not None and newest > saved
    if step is not None or is_newer:
        found = find_step(run.checkpoints, step, where=str(run.path))
        return TrainedWeights(path=found, run=run, step=step_of(found))
    if not run.model.is_dir():
        from trimaran.app import ACTIVE_STATUSES, RunState

        state = RunState(run, only_status=True)
        state.refresh()
        train = state.recipe.train
        unsaved = "" if train.save else ", and train.save is false"
        what = f"{STATUS_TEXT[state.status]} at step {state.step} of {train.steps}{unsaved}"

        def command(name: str, *words: str) -> str:
            return f"`{shlex.join([program_name(), name, *words])}`"

        shown, save = path_argument(run.path), [] if train.save else ["--set", "train.save=true"]
        if state.status in ACTIVE_STATUSES:
            fix = templated("wait until it ends: {command} shows it", command=command("watch", shown))
        elif state.status != "done":
            why = (
                ""
                if state.status == "stopped"
                else templated("see what happened with {command}, then ", command=command("watch", shown))
            )
            fix = templated(
                "{why}train to the last step with {command}", why=why, command=command("resume", shown, *save)
            )
        else:
            fix = templated("train again with {command}", command=command("train", path_argument(run.recipe), *save))
        raise UserError("A009.run-no-trained", where=str(run.model), fix=fix, text=what)
    return TrainedWeights(path=run.model, run=run)


def saved_step(run: RunDirectory) -> int | None:
    """Return the step whose weights the run saved at its end; None if nobody knows."""
    from trimaran.app import RunState

    state = RunState(run, only_status=True)
    state.refresh()
    return max((event.step for event in state.events_of_kind("saved")), default=None)

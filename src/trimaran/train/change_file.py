"""Rank 0's side of a request to change the plan: it notices the file, checks the request and writes the answer."""

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trimaran.core import Plan, Prediction, Recipe, UserError, dump_recipe, parse_recipe
from trimaran.runs import ChangeRequest, ChangeStatus, Journal, RunDirectory, read_change_request, replace_recipe
from trimaran.train.checkpointing.checkpointer import Checkpointer

log = logging.getLogger(__name__)

MAX_WAITS = 100  # steps that a change waits for a checkpoint that is due or being written


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChange:
    """A request that passed all checks. `in_place`: the networks, the optimizer and the process groups stay."""

    request: ChangeRequest
    recipe: Recipe
    plan: Plan
    in_place: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, for the other ranks."""
        prediction = self.plan.prediction
        return {
            "request": self.request.as_dict(),
            "recipe": dump_recipe(self.recipe),
            "plan": self.plan.model_dump(mode="json"),
            "prediction": prediction.model_dump(mode="json") if prediction else None,
            "in_place": self.in_place,
        }


def change_from_dict(tree: Mapping[str, Any]) -> CheckedChange:
    prediction = Prediction.model_validate(tree["prediction"]) if tree["prediction"] else None
    return CheckedChange(
        request=ChangeRequest(**tree["request"]),
        recipe=parse_recipe(tree["recipe"], name="recipe.yaml"),
        plan=Plan.model_validate(tree["plan"]).model_copy(update={"prediction": prediction}),
        in_place=tree["in_place"],
    )


class ChangeFile:
    """The request file of a run; on other ranks than 0 there is never a request.

    A thread reads and checks a request while training continues. It refuses an invalid one at once; no step waits for
    it.
    """

    def __init__(self, run: RunDirectory, journal: Journal, environment: Mapping[str, str]) -> None:
        self._run, self._journal, self._environment = run, journal, environment
        self._path = os.fspath(run.change_request) if journal.rank == 0 else ""
        self._thread: threading.Thread | None = None
        self._checked: CheckedChange | UserError | None = None
        self._request = ChangeRequest(id=0)
        self._num_waits, self._is_ready, self._is_taken = 0, False, False
        self.step = 0  # the last one that is done, for the answer
        self._checkpointer: Checkpointer | None = None

    def watch(self, checkpointer: Checkpointer) -> None:
        """Let a change wait while this checkpointer writes a checkpoint, or is about to."""
        self._checkpointer = checkpointer

    def is_requested(self, step: int) -> bool:
        """Return whether a valid request is ready after `step` steps. Without one, that costs one system call."""
        self.step = step
        if self._is_ready:  # the ranks agree on it one step later: it must not change until they have taken it
            return not self._is_taken
        if not self._path or (self._thread is None and not os.path.exists(self._path)):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._check, name="trimaran-change", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            return False
        if isinstance(self._checked, UserError):
            self.answer(self._request, "refused", error=self._checked)
            return False
        if self._checked is None:
            return False
        pending = read_change_request(self._run)
        if pending is not None and pending.id != self._request.id:  # a person has replaced it
            self._thread = None
            return False
        self._num_waits += 1
        saves = self._checkpointer is not None and (self._checkpointer.is_saving or self._checkpointer.wants_save)
        self._is_ready = self._num_waits > MAX_WAITS or not saves
        return self._is_ready

    def take(self, step: int) -> CheckedChange | None:
        """Return the request that the ranks agreed on after `step` steps; None on other ranks than 0."""
        self.step, self._is_taken = step, True
        return self._checked if isinstance(self._checked, CheckedChange) else None

    def answer(
        self,
        request: ChangeRequest,
        status: ChangeStatus,
        *,
        how: str | None = None,
        pause_seconds: float | None = None,
        parts: Mapping[str, float] | None = None,
        error: UserError | Exception | None = None,
    ) -> None:
        """Write the `change` event and remove the request, unless a user has replaced it by another one."""
        self._thread, self._checked, self._num_waits = None, None, 0
        self._is_ready = self._is_taken = False
        if not self._path:
            return
        facts = None
        if isinstance(error, UserError):
            facts = {"code": error.code, "what": error.what, "fix": error.fix}
        elif error is not None:
            facts = {"code": "S044", "what": str(error)[:500], "fix": "see the logs of the ranks"}
        seconds = None if pause_seconds is None else round(pause_seconds, 3)
        self._journal.event("change", step=self.step, **request.as_dict() | {
            "status": status, "how": how, "pause_seconds": seconds, "pause_parts": parts, "error": facts})  # fmt: skip
        log.info("change %d: %s %s", request.id, status, facts["what"] if facts else "")
        pending = read_change_request(self._run)
        if pending is None or pending.id <= request.id:
            with suppress(OSError):
                os.unlink(self._path)

    def drop(self, why: str, status: ChangeStatus = "failed", *, step: int | None = None) -> None:
        """Answer a pending request: the ranks that it was meant for are gone, or the run is done after `step`.

        The default `step` is the last one given to `is_requested` or `take`.
        """
        self.step = self.step if step is None else step
        if self._path and os.path.exists(self._path):
            request = read_change_request(self._run) or ChangeRequest(id=0)
            fix = "request it again" if status == "failed" else "resume the run with --set"
            if status == "failed" and self._was_made(request):
                self.answer(request, "applied", how="restarted")
            else:
                self.answer(request, status, error=UserError("S044", why, where=self._path, fix=fix))

    def _was_made(self, request: ChangeRequest) -> bool:
        """Return whether the ranks died after they made the change and before they answered it.

        The plan is written before the recipe. If the recipe is missing, it is written here.
        """
        from trimaran.planner.change_plan import change_run, patch_between  # noqa: PLC0415  few runs need the planner in a rank

        recipe, plan = self._run.read_recipe(), self._run.read_plan()
        try:
            changed = change_run(recipe, plan, request.patch, self._environment)
        except UserError:
            return False
        if patch_between(plan, changed.plan):
            return False
        if any(name.startswith("plan.") for name in request.patch):
            replace_recipe(self._run, changed.recipe)
            return True
        return changed.recipe == recipe

    def _check(self) -> None:
        request = read_change_request(self._run)
        self._request = request or ChangeRequest(id=0)
        if request is None:
            self._checked = UserError("S044.change-json", where=self._path)
            return
        try:
            from trimaran.planner.change_plan import change_run, patch_between  # noqa: PLC0415  few runs need the planner in a rank

            recipe, plan = self._run.read_recipe(), self._run.read_plan()
            changed = change_run(recipe, plan, request.patch, self._environment)
            if changed.recipe == recipe and not patch_between(plan, changed.plan):
                raise UserError("S040.run-plan-already", where="plan")
            self._checked = CheckedChange(
                request=request, recipe=changed.recipe, plan=changed.plan, in_place=changed.how == "in place"
            )
        except UserError as error:
            self._checked = error
        except Exception as error:  # a fault of ours must not end the run
            log.exception("the request to change the plan could not be checked")
            self._checked = UserError("S044.change-failed", where=self._path, kind=type(error).__name__, error=error)

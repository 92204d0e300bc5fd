"""The recipe section `autopilot`: whether a run changes its own plan, and what it must leave alone."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trimaran.core.errors import did_you_mean
from trimaran.core.plan import Plan
from trimaran.core.plugins import PolicyName

AutopilotMode = Literal["off", "advise", "act"]
# Fields outside the plan that a running run can change, in place.
OTHER_CHANGEABLE_FIELDS = (
    "data.workers",
    "checkpoint.every",
    "checkpoint.memory",
    "checkpoint.lost_seconds",
    "checkpoint.asynchronous",
    "faults.expandable_segments",
)


class AutopilotSection(BaseModel):
    """What the autopilot does: nothing (`off`), write down what it would change (`advise`), or change it (`act`).

    It tries one change at a time, measures it against the steps before, and keeps it only if steps are shown to be
    shorter. What it changes never changes the results of training, unless `may_change_course` allows that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    mode: AutopilotMode = "advise"
    keep: Annotated[
        tuple[str, ...], Field(max_length=64, description="fields that it leaves alone, such as [mesh, micro_batch]")
    ] = ()
    may_change_course: Annotated[
        bool, Field(description="may change compression, local steps and precision, and with them the results")
    ] = False
    budget: Annotated[
        float, Field(ge=0, le=0.5, description="fraction of the run's time that trials may cost; 0: no trials")
    ] = 0.03

    policy: Annotated[PolicyName, Field(description="what chooses the next change: built-in, or a plug-in")] = (
        "built-in"
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value

    @field_validator("keep")
    @classmethod
    def _known_fields(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # Fields and sections of the plan, with or without `plan.`, and the others.
        plan = tuple(_names(Plan().model_dump(), ""))
        known = (*plan, *(f"plan.{name}" for name in plan), "checkpoint", *OTHER_CHANGEABLE_FIELDS)
        for name in names:
            if name not in known:
                raise ValueError(f"'{name}' is not a field that the autopilot changes{did_you_mean(name, known)}")
        return names


def section_of_mode(value: Any) -> Any:
    """Return the section for a mode alone, such as `autopilot: act`; YAML reads `off` as false."""
    return {"mode": value} if isinstance(value, str | bool) else value


def _names(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")

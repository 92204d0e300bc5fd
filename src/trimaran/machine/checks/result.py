"""The result of one machine check, and short constructors for it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]
WORST_FIRST: dict[Status, int] = {"fail": 0, "warn": 1, "pass": 2, "skip": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the checklist: `what` was found, with its numbers, and a `fix` if something is wrong.

    `fail`: a run would crash or compute wrong results. `warn`: it would be slower or is at risk.
    `skip`: the check could not run, and `what` says why.
    """

    code: str
    title: str
    status: Status
    what: str
    fix: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """A check's code and title. Its methods build the check's results."""

    code: str
    title: str

    def passed(self, what: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="pass", what=what, evidence=evidence)

    def warn(self, what: str, fix: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="warn", what=what, fix=fix, evidence=evidence)

    def fail(self, what: str, fix: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="fail", what=what, fix=fix, evidence=evidence)

    def skipped(self, why: str) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="skip", what=why)

    def worst(self, problems: "list[Problem]", healthy: str, **evidence: Any) -> CheckResult:
        """Return one result for all `problems`, with the status of the worst; a pass with `healthy` if none."""
        if not problems:
            return self.passed(healthy, **evidence)
        fatal_first = sorted(problems, key=lambda each: not each.is_fatal)
        fixes = list(dict.fromkeys(each.fix for each in fatal_first))
        return CheckResult(
            code=self.code,
            title=self.title,
            status="fail" if fatal_first[0].is_fatal else "warn",
            what="; ".join(each.what for each in fatal_first),
            fix="; ".join(fixes),
            evidence=evidence,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One of possibly several things that a check found."""

    what: str
    fix: str
    is_fatal: bool = False

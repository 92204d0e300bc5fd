"""What one look at a machine comes to."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]
WORST_FIRST: dict[Status, int] = {"fail": 0, "warn": 1, "pass": 2, "skip": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the checklist: `what` was seen, with its numbers, and the `fix` where something is to be mended.

    `fail` means that a run would break or compute wrong numbers, `warn` that it would be slower or is at risk, `skip`
    that nothing could be looked at, and `what` says why.
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
    """A check's own code and title, so that each of its answers is one short call."""

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

    def worst(self, troubles: "list[Trouble]", healthy: str, **evidence: Any) -> CheckResult:
        """Return one line for all `troubles`, as bad as the worst of them; `healthy` where there are none."""
        if not troubles:
            return self.passed(healthy, **evidence)
        first = sorted(troubles, key=lambda each: not each.is_fatal)
        fixes = list(dict.fromkeys(each.fix for each in first))
        return CheckResult(
            code=self.code,
            title=self.title,
            status="fail" if first[0].is_fatal else "warn",
            what="; ".join(each.what for each in first),
            fix="; ".join(fixes),
            evidence=evidence,
        )


@dataclass(frozen=True, slots=True)
class Trouble:
    """One of possibly several things that a check found."""

    what: str
    fix: str
    is_fatal: bool = False

"""All-reduce: every rank gets the right sum, to the bit."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H016", "all-reduce, right")


def check(facts: Facts) -> CheckResult:
    """Say whether sums over all ranks of this machine came out right."""
    measured = facts.measured
    if measured is None or measured.missing:
        return LOOK.skipped(measured.missing if measured else "the quick look measures nothing")
    if not measured.reduce:
        return LOOK.skipped("one device: nothing to sum")
    answer = measured.reduce
    if error := answer.get("error"):
        return LOOK.fail(f"ranks of this machine could not sum: {error}",
                         "see the lines above for the backend's own words; NCCL_DEBUG=WARN says more")  # fmt: skip
    ranks, backend = answer["ranks"], answer["backend"]
    if wrong := answer["wrong"]:
        where = ", ".join(f"rank {rank} ({count:,} numbers)" for rank, count in sorted(wrong.items()))
        return LOOK.fail(f"{backend} sums over {ranks} ranks are wrong on {where}",
                         "do not train here: run `dcgmi diag -r 3`, try NCCL_P2P_DISABLE=1 to find the link",
                         wrong=dict(wrong))  # fmt: skip
    return LOOK.passed(f"{answer['checked']:,} sums over {ranks} {backend} ranks, every one right to the bit")

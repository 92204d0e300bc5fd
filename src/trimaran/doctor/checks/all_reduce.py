"""H016: every rank gets the exact all-reduce result."""

from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H016", "all-reduce result")


def check(facts: Facts) -> CheckResult:
    """Report whether an all-reduce over all ranks of this machine was bitwise correct."""
    measured = facts.measured
    if measured is None or measured.missing:
        return INFO.skipped(measured.missing if measured else "--quick measures nothing")
    if not measured.all_reduce:
        return INFO.skipped("only one device, so there is no all-reduce")
    answer = measured.all_reduce
    if error := answer.get("error"):
        return INFO.fail(f"the all-reduce between ranks of this machine failed: {error}",
                         "read the backend's messages above; NCCL_DEBUG=WARN prints more")  # fmt: skip
    ranks, backend = answer["ranks"], answer["backend"]
    if wrong := answer["wrong"]:
        where = ", ".join(f"rank {rank} ({count:,} values)" for rank, count in sorted(wrong.items()))
        return INFO.fail(f"the {backend} all-reduce over {ranks} ranks gave wrong results on {where}",
                         "do not train here: run `dcgmi diag -r 3`; try NCCL_P2P_DISABLE=1 to find the faulty link",
                         wrong=dict(wrong))  # fmt: skip
    return INFO.passed(f"all {answer['checked']:,} values over {ranks} {backend} ranks are bitwise correct")

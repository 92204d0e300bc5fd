"""The cost of a complete run: days, money, and the time lost to failures."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from trimaran.core import Plan, Seconds, UserError, show_count, show_seconds
from trimaran.cost.goodput import (
    Bill,
    Faults,
    Goodput,
    bill_of,
    checkpoint_bytes,
    expected_goodput,
    write_seconds,
)
from trimaran.machine import Cluster
from trimaran.planner import Question

# Assumptions, shown with every result: the bandwidth of a node to a parallel file system, and the time of a restart,
# which detects the fault, starts the processes, reads the checkpoint and compiles.
NODE_DISK_BANDWIDTH = 2e9  # bytes a second
RESTART_SECONDS = Seconds(600.0)
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """Tokens of a run, price of a GPU hour, and mean time between failures of a GPU; None if not given."""

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None


def read_cost_terms(*, tokens: str | None, price: float | None, mtbf: float | None) -> CostTerms:
    """Return the terms from the command line: tokens as `300B`, `1.5T` or `15e12`."""
    for option, value in (("--price", price), ("--mtbf", mtbf)):
        if value is not None and not 0 < value < 1e12:
            raise UserError("A013", f"{value:g} is not a number above 0", where=option, fix=f"write {option} 2.5")
    if price is not None and tokens is None:
        raise UserError("A013", "a price needs a number of tokens", where="--price", fix="add --tokens 1T")
    if tokens is None:
        return CostTerms(price=price, mtbf_hours=mtbf)
    match = NUMBER.fullmatch(tokens.strip().replace("_", "").replace(",", ""))
    count = float(match[1]) * SUFFIXES[match[2].lower()] if match else 0.0
    if not 0 < count < 1e24:
        raise UserError(
            "A013", f"'{tokens}' is not a number of tokens", where="--tokens", fix="write 300B, 1T or 15e12"
        )
    return CostTerms(tokens=count, price=price, mtbf_hours=mtbf)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """The cost of a plan: goodput if the failure rate is given, a bill if the tokens are."""

    terms: CostTerms
    goodput: Goodput | None
    bill: Bill | None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The cost as rows of a table: name and text."""
        rows = []
        if good := self.goodput:
            save = "never save" if math.isinf(good.interval) else f"save every {show_seconds(good.interval)}"
            lost = ", ".join(f"{name} take {fraction:.1%}" for name, fraction in good.lost.items() if fraction)
            assumed = (
                f"a node writes {NODE_DISK_BANDWIDTH / 1e9:g} GB/s, a restart takes {show_seconds(RESTART_SECONDS)}"
            )
            if good.fraction > 0:
                rows.append(("goodput", f"{good.fraction:.1%} of the time: {save}; {lost} (assumed: {assumed})"))
            else:
                rows.append(("goodput", f"the run would never end: failures come faster than it recovers ({assumed})"))
        if bill := self.bill:
            days = f"{bill.days:,.1f} days for {show_count(self.terms.tokens or 0)} tokens"
            cost = "" if self.terms.price is None else f", {bill.cost:,.0f} at {self.terms.price:g} an hour"
            rows.append(("bill", f"{days}, {show_count(bill.device_hours)} GPU hours{cost}"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of `--json`; None for what was not requested."""
        bill: dict[str, Any] = asdict(self.bill) if self.bill else {}
        if bill and self.terms.price is None:
            bill["cost"] = None
        good: dict[str, Any] = asdict(self.goodput) if self.goodput else {}
        if good:
            assumed = {"restart_seconds": RESTART_SECONDS, "node_disk_bytes_per_second": NODE_DISK_BANDWIDTH}
            good = {"share": good.pop("fraction")} | good  # the key of `--json`
            interval = good["interval"] if math.isfinite(good["interval"]) else None  # JSON has no infinity
            good |= {"interval": interval, "assumed": assumed}
        return {"goodput": good or None, "bill": bill or None}


def run_cost_of(plan: Plan, question: Question, cluster: Cluster, terms: CostTerms) -> RunCost:
    """Return the cost of a run with the plan on `cluster`; empty if the plan has no prediction."""
    found, goodput, bill = plan.prediction, None, None
    if found and terms.mtbf_hours is not None and question.outline:
        moments = question.job.state_bytes
        states = checkpoint_bytes(question.outline.trained_parameters, moment_bytes=moments)
        write = write_seconds(states, disk_bandwidth=NODE_DISK_BANDWIDTH * cluster.num_nodes)
        faults = Faults(device_hours=terms.mtbf_hours, restart=RESTART_SECONDS)
        goodput = expected_goodput(faults, cluster.world_size, write=write, step=found.step_seconds)
    share = goodput.fraction if goodput else 1.0
    if found and terms.tokens is not None and share > 0:
        bill = bill_of(terms.tokens, found.tokens_per_second, num_devices=cluster.world_size,
                       hour_price=terms.price or 0.0, goodput=share)  # fmt: skip
    return RunCost(terms=terms, goodput=goodput, bill=bill)

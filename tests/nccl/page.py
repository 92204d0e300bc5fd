"""The results of `tests.nccl`: a JSON line for each row, and the page that shows them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]

LAST_RESULT = "A row that failed is run again by the next call, and its last result is shown."
CANNOT_SHOW = """\
## What one GPU cannot show

All ranks share one device, and each calls itself another host (`TRIMARAN_SHARE_GPUS=1`, `fork_server_process.py`).
So NCCL uses its socket transport over the loopback interface. These runs say nothing about:

- NVLink, NVSwitch and NVLS, and NCCL's shared-memory and peer-to-peer transports;
- several hosts, InfiniBand, RoCE and GPUDirect RDMA;
- one process for each GPU of a node: that ranks choose different devices;
- speed: ranks take turns on one GPU, so that seconds here are no measure of a plan;
- a GPU that fails: a lost device, an XID error, uncorrectable ECC errors."""


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """Return the last result of each row in a file, by section and name; empty without a file."""
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {(each["section"], each["name"]): each for each in results}


def add_result(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def render_page(results: Sequence[Result], facts: Mapping[str, str], *, missing: Sequence[str] = ()) -> str:
    """Return the page for `results` and the `facts` of the machine they are from; `missing` rows have no result."""
    num_passed = sum(each["passed"] for each in results)
    summary = f"Of {len(results) + len(missing)} rows {num_passed} pass, {len(results) - num_passed} fail and "
    summary += f"{len(missing)} were not run."
    parts = [
        "# Parity, faults, resumes and courses over NCCL",
        f"`make nccl` writes this page on a machine with a GPU.\n{summary}\n{LAST_RESULT}",
        _table(["", ""], [[name, value] for name, value in facts.items()]),
        CANNOT_SHOW,
        _parity_section([each for each in results if each["section"] == "parity"]),
        _fault_section([each for each in results if each["section"] == "faults"]),
        _resume_section([each for each in results if each["section"] == "resume"]),
        _course_section([each for each in results if each["section"] == "course"]),
        "\n".join(["## Not run", "", *(f"- {name}" for name in missing)]) if missing else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parity_section(rows: Sequence[Result]) -> str:
    if not rows:
        return ""
    text = """\
## Parity

Each row trains 10 steps of [the matrix](parity.md) over NCCL and the same steps in one process on the same GPU, both in
the same precision and compiled or not.
The columns are the largest relative differences: loss and gradient norm over all steps, weights over all tensors after
the last step.
The ranks of a row share the GPU under CUDA MPS, and several rows run at a time.
In fp32 the tolerance holds for all three; in bf16 for the loss, and ten times it for the gradient norm."""
    head = ["plan", "model", "ranks", "precision", "compiled", "loss", "gradient norm", "weights", "tolerance", "s", ""]
    ordered = sorted(rows, key=lambda row: (row["compiled"], row["precision"] != "fp32", row["ranks"]))
    return f"{text}\n\n{_table(head, [_parity_cells(each) for each in ordered])}"


def _parity_cells(row: Result) -> list[str]:
    first = [row["plan"], row["model"], str(row["ranks"]), row["precision"], "yes" if row["compiled"] else "no"]
    numbers = [f"{row[name]:.1e}" if name in row else "-" for name in ("loss", "norm", "weights")]
    return [*first, *numbers, f"{row['tolerance']:.0e}", f"{row.get('seconds', 0):.0f}", _verdict(row)]


def _fault_section(rows: Sequence[Result]) -> str:
    if not rows:
        return ""
    text = """\
## Faults

Each fault happens to a run under the real supervisor.
`detected` is the time from the fault to the incident, `recovered` that from the last progress to the first new step.
The run passes if the cause and the rank at fault are named, it restarts, and the final losses and weights equal those
of a run without faults, bit for bit."""
    head = ["fault", "plan", "ranks", "detected", "recovered", "steps lost", "incident", ""]
    return f"{text}\n\n{_table(head, [_fault_cells(each) for each in rows])}"


def _fault_cells(row: Result) -> list[str]:
    numbers = [f"{row[name]:.1f} s" if name in row else "-" for name in ("detected", "recovered")]
    lost = f"{row['lost']:.0f}" if "lost" in row else "-"
    first = [row["name"].partition("@")[0], row["plan"], str(row["ranks"])]
    return [*first, *numbers, lost, row.get("what", ""), _verdict(row)]


def _resume_section(rows: Sequence[Result]) -> str:
    if not rows:
        return ""
    text = """\
## Resumes

Each run is interrupted and resumes from the named copy of its state; its final losses and weights equal those of a run
without interruption, bit for bit."""
    cells = [[each["name"], each["plan"], str(each["ranks"]), each.get("what", ""), _verdict(each)] for each in rows]
    return f"{text}\n\n{_table(['from', 'plan', 'ranks', 'resumed', ''], cells)}"


def _course_section(rows: Sequence[Result]) -> str:
    if not rows:
        return ""
    text = """\
## What changes the course of training

Compression, local steps and stale gradients do not train the same trajectory.
The columns are held-out losses after equal tokens, the means of three seeds, in nats per byte: of the method, of
synchronous training, and the largest that is allowed."""
    cells = [
        [each["name"], str(each["ranks"])]
        + [f"{each[name]:.4f}" if name in each else "-" for name in ("loss", "synchronous", "limit")]
        + [_verdict(each)]
        for each in rows
    ]
    return f"{text}\n\n{_table(['method', 'ranks', 'loss', 'synchronous', 'limit', ''], cells)}"


def _verdict(row: Result) -> str:
    if row["passed"]:
        return "pass"
    return f"FAIL: {row['error'].strip().splitlines()[-1][:160]}" if "error" in row else "FAIL"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(each.replace('|', '/') for each in row)} |" for row in rows)])

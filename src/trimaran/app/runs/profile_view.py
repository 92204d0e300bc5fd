"""Prints a profile as tables: where the time goes, what uses the memory."""

from pathlib import Path
from typing import Any

from rich.console import Console

from trimaran.app.show.clean_console import plain_table
from trimaran.core import show_bytes

NUMBERS_WIDTH = 32  # columns of the numbers of a row
MAX_ROWS = 10


def show_profile(answer: dict[str, Any], console: Console) -> None:
    """Print the answer of `trimaran profile`."""
    if "merged" in answer:
        ranks = ", ".join(map(str, answer["ranks"]))
        console.print(
            f"{answer['merged']}\nfrom step {answer['step']}, ranks {ranks}; open it at https://ui.perfetto.dev"
        )
        for host, clock in answer["clocks"].items():
            if clock["shift_microseconds"]:
                console.print(f"clock of {host} shifted by {clock['shift_microseconds'] / 1e3:+.3f} ms")
        return
    for command in answer.get("commands", ()):
        console.print(command, soft_wrap=True)
    for file, recorded in zip(answer["files"], answer.get("nsys", ()), strict=False):
        console.print(file, soft_wrap=True)
        phases = [each for each in recorded["ranges"] if each["is_phase"]]
        others = [each for each in recorded["ranges"] if not each["is_phase"]][:MAX_ROWS]
        if not phases:
            console.print("`nsys stats` has shown no ranges of this file; open it in Nsight Systems", soft_wrap=True)
            continue
        table = plain_table("time", "share", "calls", texts=[f"range of rank {recorded['rank']}"])
        for row in (*phases, *others):
            name = row["text"] if row["is_phase"] else f"  {row['text']}"
            table.add_row(f"{row['seconds'] * 1e3:.2f} ms", f"{row['share']:.1%}", f"{row['calls']:,}", name)
        console.print(table)
    for file, trace in zip(answer["files"], answer.get("traces", ()), strict=False):
        console.print(file, soft_wrap=True)
        (first, last), seconds = trace["steps"], trace["seconds"]
        idle = "device idle" if trace["on_device"] else "no operator running"
        text = f"steps {first} to {last} of rank {trace['rank']}: {seconds:.3f} s; {idle} {trace['idle'] / seconds:.1%}"
        if trace["communication"]:
            text += f"; communication {trace['communication'] / seconds:.1%}, exposed {trace['exposed'] / seconds:.1%}"
        console.print(text, soft_wrap=True)
        table = plain_table("self time", "share", "calls", texts=["kernel" if trace["on_device"] else "operator"])
        longest = max(20, console.width - NUMBERS_WIDTH)
        for row in trace["rows"][:MAX_ROWS]:
            name = row["name"]
            short = name if len(name) <= longest else f"{name[: longest - 3]}..."
            table.add_row(f"{row['seconds'] * 1e3:.2f} ms", f"{row['share']:.1%}", f"{row['calls']:,}", short)
        console.print(table)
    for file, memory in zip(answer["files"], answer.get("memory", ()), strict=False):
        console.print(file, soft_wrap=True)
        total = f" of {show_bytes(memory['total'])}" if memory.get("total") else ""
        held = "allocated" if memory["device"].startswith("cuda") else "resident"
        console.print(f"step {memory['step']} on {memory['device']}: {show_bytes(memory['allocated'])} {held}{total}")
        within = memory.get("within", {"kinds": {}, "holders": []})
        kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in (memory["kinds"] | within["kinds"]).items())
        console.print(f"known: {kinds}", soft_wrap=True)
        if peak := memory.get("peak"):
            console.print(f"peak: {show_bytes(peak['allocated'])}, of which {show_bytes(peak['from_before'])} was "
                          "allocated before the history began", soft_wrap=True)  # fmt: skip
        table = plain_table("bytes", "count", texts=["kind", "module"])
        rows = sorted([*memory["holders"], *within["holders"]], key=lambda row: -row["bytes"])
        for row in rows[:MAX_ROWS]:
            table.add_row(show_bytes(row["bytes"]), str(row["count"]), row["kind"], row["module"])
        console.print(table)
        lines = peak["lines"] if peak else memory["lines"]
        if lines:
            table = plain_table("bytes", "count", texts=["line", "function"])
            for row in lines[:MAX_ROWS]:
                where = f"{Path(row['file']).name}:{row['line']}" if row["file"] else "unknown"
                table.add_row(show_bytes(row["bytes"]), str(row["count"]), where, row["function"])
            console.print(table)

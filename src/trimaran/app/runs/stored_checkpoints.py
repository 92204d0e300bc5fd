"""The checkpoints in an object store: a list of them, and whether they are intact."""

import time
from collections.abc import Callable
from typing import Any

import typer

from trimaran.checkpoint import DamagedError, ObjectStore, StoredStep, StoreError, open_store, unusable_store
from trimaran.core import UserError, show_bytes


def list_stored(url: str) -> dict[str, Any]:
    """Return the checkpoints in the store, oldest first. If it cannot be used, `error` says why."""
    try:
        store = open_store(url)
        rows = [_row(store, each) for each in store.steps()]
    except (StoreError, UserError) as error:
        why = f"{error.what}; {error.fix}" if isinstance(error, UserError) else str(error)
        return {"url": url, "checkpoints": [], "error": why}
    return {"url": url, "checkpoints": rows}


def _row(store: ObjectStore, stored: StoredStep) -> dict[str, Any]:
    row = {"step": stored.step, "name": stored.name, "status": "unfinished", "bytes": sum(stored.sizes.values())}
    if stored.refused:
        return row | {"status": "refused", "why": "the run went back to an earlier step, because this state was bad"}
    if not stored.complete:
        return row
    try:
        manifest, _ = store.read_manifest(stored.name)
    except DamagedError as error:
        return row | {"status": "damaged", "why": str(error.damages[0])}
    wrong = [file for file, record in manifest.files.items() if stored.sizes.get(file) != record.bytes]
    status = {"status": "damaged", "why": f"{wrong[0]} is missing or has another length"} if wrong else {}
    return row | {"status": "complete", "time": manifest.time} | status


def show_stored(stored: dict[str, Any]) -> None:
    """Print the checkpoints in the store, one a line."""
    if stored.get("error"):
        typer.echo(f"the store {stored['url']} cannot be read: {stored['error']}")
        return
    typer.echo(f"in {stored['url']}:" if stored["checkpoints"] else f"no checkpoint in {stored['url']} yet")
    for row in stored["checkpoints"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if "time" in row else ""
        parts = [f"  step {row['step']}", show_bytes(row["bytes"]), when, row["status"], row.get("why", "")]
        typer.echo("  ".join(filter(None, parts)))


def verify_stored(url: str, step: int | None, progress: Callable[[str, float], None]) -> list[dict[str, Any]]:
    """Return what is wrong with the checkpoint of `step` in the store, or with each, after reading every byte."""
    store = open_store(url)
    try:
        steps = [each for each in store.steps() if each.complete]
        chosen = [each for each in steps if step in (None, each.step)]
        if not chosen:
            known = ", ".join(str(each.step) for each in steps) or "none yet"
            raise UserError("K028", "the store has no such complete checkpoint", where=url, fix=f"it has: {known}")
        return [{"step": each.step, "name": each.name, "damages": _damages(store, each, progress)} for each in chosen]
    except StoreError as error:
        raise unusable_store(url, str(error)) from None


def _damages(store: ObjectStore, stored: StoredStep, progress: Callable[[str, float], None]) -> list[str]:
    total, done = max(1, sum(stored.sizes.values())), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes

    def show() -> None:
        progress(f"verifying {stored.name} in the store", min(1.0, done / total))

    return [str(each) for each in store.verify(stored.name, count, show)]

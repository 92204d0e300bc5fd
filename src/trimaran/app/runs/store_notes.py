"""What a run has to say about its object store, as lines of text."""

from collections.abc import Iterator

from trimaran.app.runs.run_state import RunState
from trimaran.core import show_bytes, show_seconds


def store_notes(state: RunState) -> Iterator[str]:
    """Yield what the current attempt took from the store, and how far the upload is that it waits for at its end."""
    if not (url := state.recipe.checkpoint.store):
        return
    for event in state.current_events("resume"):
        if event.data.get("tier") == "store":
            yield f"step {event.step} was fetched from {url}: this run directory had no newer state"
    for event in state.current_events("upload"):
        if (fraction := event.data.get("sent")) is not None:
            yield f"uploading step {event.step} to {url}: {fraction:.0%}"


def store_summary(state: RunState) -> str:
    """Return what the store has of this run at its end; an empty text if the run has no store."""
    url = state.recipe.checkpoint.store
    ended = [event for event in state.events_of_kind("upload") if "sent" not in event.data]
    if not url or not ended:
        return ""
    last, done = ended[-1], [event for event in ended if "failed" not in event.data]
    if "failed" in last.data:
        newest = f"it has step {done[-1].step}" if done else "it has no checkpoint of this run"
        return f"step {last.step} is not in {url}, {newest}: {last.data['failed']}"
    took = f"{show_bytes(last.data['bytes'])} in {show_seconds(last.data['seconds'])}"
    return f"step {last.step} is also in {url} ({took})"

"""The parts of a run's files that could not be read, or were not read, as text."""

from trimaran.app.runs.run_state import RunState
from trimaran.core import show_bytes, show_count


def unread_texts(state: RunState) -> list[str]:
    """Return a line for each damaged line, and one if steps were estimated."""
    texts = [
        f"{each.file}: a line of {show_bytes(each.num_bytes)} at byte {each.offset:,} is damaged and was skipped"
        for each in state.long_lines
    ]
    if state.num_estimated:
        name, count = state.run.metrics_index.name, show_count(state.num_estimated)
        texts.append(f"{name} is missing or incomplete: {count} steps were not read, sums and curves are estimates")
    return texts

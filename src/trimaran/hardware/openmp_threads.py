"""Reads OMP_NUM_THREADS as OpenMP does: a number of threads, or a list with one for each level of nesting."""

MAX_THREADS = 4096  # of one process; more is a mistake, and the threads could not all be started


def openmp_threads(value: str | None) -> int | None:
    """Return the threads of the outermost level, the one that torch uses.

    None if the variable is not set, empty or not valid. OpenMP ignores a list with any part that is not positive.
    """
    parts = [part.strip() for part in (value or "").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 and int(part) > 0 for part in parts):
        return None
    return int(parts[0]) if int(parts[0]) <= MAX_THREADS else None

"""How tensor parallelism splits a vocabulary: in parts of equally many rows, except for the last ones."""


def rows_per_rank(rows: int, degree: int) -> int:
    """Return how many rows the first of `degree` ranks holds; the last ranks may hold fewer."""
    return -(-rows // degree)


def every_rank_has_rows(rows: int, degree: int) -> bool:
    """Return whether no rank is left without rows."""
    return rows_per_rank(rows, degree) * (degree - 1) < rows

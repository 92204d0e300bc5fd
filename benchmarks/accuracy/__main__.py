"""`python -m benchmarks.accuracy [--write]`: the tables of prediction errors; exit code 1 if a bound is broken."""

import sys
from pathlib import Path

from benchmarks.accuracy.ask import HELD_OUT, SMALL, ask, own_cases
from benchmarks.accuracy.measures import OWN, OWN_LATER, OWN_SMALL, broken
from benchmarks.accuracy.page import image, markdown, page, table
from benchmarks.accuracy.peers import ask_peer, present
from benchmarks.accuracy.published import SOURCES
from benchmarks.accuracy.refit import left_out
from benchmarks.accuracy.sets import rows_csv, sets_table

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    ours = {name: ask(runs()) for name, runs in SOURCES.items()}
    ours |= {OWN: list(own_cases()), OWN_LATER: list(own_cases(HELD_OUT)), OWN_SMALL: list(own_cases(SMALL))}
    runs = {source: [case.run for case in cases] for source, cases in ours.items()}
    peers = {name: {source: ask_peer(peer, runs[source]) for source in runs} for name, peer in present().items()}
    print(table(ours, peers))
    print(markdown(sets_table(ours)))
    if "--write" in sys.argv:
        (DOCS / "accuracy.md").write_text(page(ours, peers, list(left_out())))
        (DOCS / "accuracy-rows.csv").write_text(rows_csv(ours))
        (DOCS / "images" / "accuracy.svg").write_text(image(ours))
    wrong = broken(ours)
    print("\n".join(wrong) or "every bound holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

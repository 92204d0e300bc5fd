"""Cases that `make test` leaves to `make slow`, because it has others of the same code.

A grid of settings is run in full by `make slow`; `make test` has each axis, setting and error at least once. A test may
also say so itself with `tests.cases.slow`; what is listed here was chosen by the time that it takes. Every line is a
test or one case of it, under what `make test` has instead.
"""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """Cases of one file that are slow, and where `make test` executes what they execute."""

    file: str
    instead: str
    names: tuple[str, ...]


VIEWS = "test_every_mode_of_a_run_shows_the_numbers_of_the_command"

LEFT_OUT = (
    LeftOut(
        "dist/test_fp8_gather.py",
        "the same without replicas",
        (
            "test_a_gather_in_fp8_changes_no_bit[tensor-hsdp]",
            "test_a_gather_in_fp8_changes_no_bit[block-hsdp]",
        ),
    ),
    LeftOut(
        "dist/test_odd_vocabulary.py",
        "the same with six ranks in place of eight",
        ("test_a_rank_knows_which_rows_it_holds[{'dp_replicate': 2, 'dp_shard': 2, 'tp': 2}]",),
    ),
    LeftOut(
        "e2e/test_own_loop.py",
        "the same with other numbers of ranks",
        ("test_dcgan_trains_as_before_on_any_number_of_ranks[7-2-none]",),
    ),
    LeftOut(
        "e2e/test_train.py",
        "tests/fault/test_supervisor.py kills ranks in every way, tests/web/test_run_page.py shows the incident, and "
        "tests/unit/test_launch_attribution.py has its text",
        ("test_a_killed_rank_is_replaced_and_the_incident_is_shown",),
    ),
    LeftOut(
        "web/test_views_page.py",
        "the modes of the other views; those of all views in tests/dist/test_viz_truth.py, without a browser; the "
        "controls of collectives",
        (
            *(f"{VIEWS}[{name}]" for name in ("collectives", "ddp", "life", "offload", "strategies", "tensor", "zero")),
            "test_every_control_changes_the_view_and_its_command[life]",
            "test_every_control_changes_the_view_and_its_command[zero]",
        ),
    ),
    LeftOut(
        "web/test_run_page.py",
        "each page at one of the two widths",
        ("test_runs_are_compared[360]", "test_every_tab_of_a_finished_run_is_drawn_and_fits[1440]"),
    ),
    LeftOut(
        "unit/test_planner_risk.py",
        "the same with a dense model of 70B",
        ("test_a_235b_mixture_on_64_h100_is_split_and_not_offloaded",),
    ),
)  # fmt: skip
SLOW_CASES = frozenset(f"tests/{each.file}::{name}" for each in LEFT_OUT for name in each.names)

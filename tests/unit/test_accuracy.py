"""Predictions stay within the promised error of measured runs, and the scoring is fair."""

import random
from functools import cache

from benchmarks.accuracy.ask import HELD_OUT, SMALL, ask, own_cases, promised
from benchmarks.accuracy.errors import Case, choices, merge_repeats, summarise
from benchmarks.accuracy.measures import OWN, OWN_LATER, OWN_SMALL, broken
from benchmarks.accuracy.published import SOURCES, Run
from benchmarks.accuracy.sets import CONSTANTS, RUN_SETS, constants_table, row_tables, rows_csv, sets_table


@cache
def predictions() -> dict[str, list[Case]]:
    ours = {name: ask(runs()) for name, runs in SOURCES.items()}
    return ours | {
        OWN: list(own_cases()),
        OWN_LATER: list(own_cases(HELD_OUT)),
        OWN_SMALL: list(own_cases(SMALL)),
    }


def case(measured: float | None, predicted: float, *, micro_batch: int = 1) -> Case:
    run = Run(
        line={"plan": {"micro_batch": micro_batch}}, model="toy", gpus=8, peak_gib=None, step_seconds=None,
        tokens_per_second_per_gpu=measured, failed=measured is None, row={},
    )  # fmt: skip
    return Case(run=run, peak_bytes=None, tokens_per_second_per_gpu=predicted, fits=True)


def test_every_promised_bound_holds() -> None:
    assert broken(predictions()) == []


def test_a_worse_prediction_breaks_a_bound() -> None:
    doubled = [Case(run=each.run, peak_bytes=2 * (each.peak_bytes or 0), tokens_per_second_per_gpu=None, fits=True)
               for each in predictions()["nanotron"]]  # fmt: skip
    assert any("memory, mean error" in line for line in broken(predictions() | {"nanotron": doubled}))


def test_our_trainer_was_measured_in_at_least_12_promised_configurations() -> None:
    rows = [each.run.row for each in predictions()[OWN] if promised(each)]
    assert len(rows) >= 12
    assert {row["preset"] for row in rows} == {"llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"}
    assert {row["compile"] for row in rows} == {True, False}
    assert {row["recompute"] for row in rows} >= {"none", "selective", "full"}


def test_an_estimator_with_equal_predictions_does_not_profit_from_a_sorted_table() -> None:
    (choice,) = choices([case(100, 7, micro_batch=1), case(50, 7, micro_batch=2), case(None, 7, micro_batch=4)])
    assert (choice.tied, round(choice.regret, 6), round(choice.failed, 6)) == (3, 0.5, 0.333333)


def test_the_order_of_the_published_rows_does_not_change_the_choice() -> None:
    shuffled = predictions()["nanotron"][:]
    random.Random(0).shuffle(shuffled)
    assert [(each.group, round(each.regret, 9)) for each in choices(merge_repeats(shuffled))] == [
        (each.group, round(each.regret, 9)) for each in choices(merge_repeats(predictions()["nanotron"]))
    ]


def test_a_configuration_that_ran_once_and_failed_once_counts_as_one_successful_plan() -> None:
    (merged,) = merge_repeats([case(None, 7), case(80, 7)])
    assert not merged.run.failed
    assert merged.run.tokens_per_second_per_gpu == 80


def test_the_summary_of_errors_is_right() -> None:
    found = summarise([0.1, -0.3, None])
    assert found is not None
    assert (found.count, round(found.mape, 9), round(found.bias, 9), found.worst) == (2, 0.2, -0.1, -0.3)


def test_every_set_is_listed_with_its_rows_also_those_that_are_predicted_badly() -> None:
    ours = predictions()
    assert {each.name for each in RUN_SETS} == set(ours)
    table = sets_table(ours)
    assert [row[0] for row in table[1:]] == [each.name for each in RUN_SETS]
    assert all(len(row) == len(table[0]) for row in table)
    lines = rows_csv(ours).splitlines()
    assert len(lines) == 1 + sum(map(len, ours.values()))
    headings = dict(row_tables(ours))
    (korthikanti,) = (rows for heading, rows in headings.items() if heading.startswith("Korthikanti"))
    assert len(korthikanti) == 1 + len(ours["Korthikanti"])


def test_no_constant_was_set_by_a_held_out_set() -> None:
    held_out = [each.name for each in RUN_SETS if not each.sets]
    assert {"NVIDIA Nemotron-4", "Korthikanti", "torchtitan", OWN_LATER} <= set(held_out)
    for constant in CONSTANTS:
        assert not any(name in constant.rows for name in held_out), constant.name
    assert all(value for _, value, _ in constants_table())

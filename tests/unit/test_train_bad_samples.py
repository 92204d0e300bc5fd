"""Too many samples that could not be used."""

from trimaran.train.health.bad_sample_limit import BadSampleCount


def test_a_share_is_judged_of_a_thousand_samples_at_least() -> None:
    tally = BadSampleCount(0.01)
    assert not tally.too_many({"samples": 50, "bad": 10})
    assert tally.too_many({"samples": 50, "bad": 1})


def test_later_good_samples_make_room_for_bad_ones() -> None:
    tally = BadSampleCount(0.01)
    assert not tally.too_many({"samples": 5000, "bad": 0})
    assert not tally.too_many({"samples": 100, "bad": 50})
    assert tally.too_many({"samples": 100, "bad": 3})


def test_a_run_that_goes_on_has_seen_what_it_saw_before() -> None:
    before, after = BadSampleCount(0.01), BadSampleCount(0.01)
    before.too_many({"samples": 500, "bad": 10})
    after.restore(before.state())
    assert after.too_many({"samples": 10, "bad": 1})


def test_data_without_counts_is_never_too_bad() -> None:
    assert not BadSampleCount(0.0).too_many({})

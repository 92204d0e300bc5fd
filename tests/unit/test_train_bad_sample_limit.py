"""A run ends when too many of its samples could not be used."""

from trimaran.train import BadSampleCount


def test_the_fraction_is_taken_of_at_least_a_thousand_samples() -> None:
    bad_samples = BadSampleCount(0.01)
    assert not bad_samples.too_many({"samples": 50, "bad": 10})
    assert bad_samples.too_many({"samples": 50, "bad": 1})


def test_more_samples_allow_more_bad_ones() -> None:
    bad_samples = BadSampleCount(0.01)
    assert not bad_samples.too_many({"samples": 5000, "bad": 0})
    assert not bad_samples.too_many({"samples": 100, "bad": 50})
    assert bad_samples.too_many({"samples": 100, "bad": 3})


def test_a_resumed_run_continues_the_counts() -> None:
    before, after = BadSampleCount(0.01), BadSampleCount(0.01)
    before.too_many({"samples": 500, "bad": 10})
    after.restore(before.state())
    assert after.too_many({"samples": 10, "bad": 1})


def test_data_without_counts_never_exceeds_the_limit() -> None:
    assert not BadSampleCount(0.0).too_many({})

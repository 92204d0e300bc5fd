"""The samples in the summary of a run."""

from trimaran.app import readable_sample


def test_undecodable_bytes_of_a_sample_are_shown_as_one_character() -> None:
    assert (
        readable_sample("def run(\ufffd\ufffd\ufffdself):\n    return 1\ufffd")
        == "def run(\ufffdself):\n    return 1\ufffd"
    )


def test_a_sample_that_is_mostly_undecodable_is_not_shown() -> None:
    assert readable_sample("def \ufffd\u0728E\ufffd\ufffdH\ufffd") == (
        "(4 of 11 characters cannot be decoded, so that the text is not shown)"
    )


def test_a_readable_sample_stays_as_it_is() -> None:
    assert readable_sample("def größe(self):\n\treturn self\n") == "def größe(self):\n\treturn self\n"

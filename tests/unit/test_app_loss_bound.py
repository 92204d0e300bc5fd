"""The sentence about what a fault of a run costs at most."""

from trimaran.app import loss_bound_text


def test_the_bound_is_said_in_steps_and_in_time() -> None:
    bound = {"steps": 3, "seconds": 0.25, "node_steps": 447, "node_seconds": 37.7}
    assert loss_bound_text(bound, total_steps=1000) == (
        "repeated after a fault of a rank: at most 3 steps (about 250 ms); "
        "after the loss of the node: at most 447 steps (about 37.7 s)"
    )


def test_without_regular_checkpoints_everything_since_the_last_one_may_be_lost() -> None:
    bound = {"steps": 2, "seconds": 0.1, "node_steps": None, "node_seconds": None}
    everything = "after the loss of the node: everything since the last checkpoint"
    assert loss_bound_text(bound, total_steps=1000).endswith(everything)
    assert loss_bound_text({}, total_steps=1000) == ""
    longer_than_the_run = {"steps": 2, "seconds": 0.1, "node_steps": 122, "node_seconds": 199.0}
    assert loss_bound_text(longer_than_the_run, total_steps=100).endswith(everything)

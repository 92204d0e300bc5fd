"""The attribution of a step's time to phases, axes and stages, from recorded timelines."""

from trimaran.train import PhaseEvent, StepSeconds, attribute


def test_laps_add_up_to_the_step_by_phase_and_those_of_communication_by_axis() -> None:
    laps = [
        PhaseEvent("data", 10.0, 10.5),
        PhaseEvent("forward", 10.5, 12.5),
        PhaseEvent("comm", 12.5, 12.75),
        PhaseEvent("comm", 12.75, 13.75, axis="dp_shard"),
        PhaseEvent("comm", 13.75, 14.0),
        PhaseEvent("data", 14.0, 15.0),
    ]
    phases = {"data": 1.5, "forward": 2.0, "comm": 1.5}
    assert attribute(laps) == StepSeconds(phases, {"world": 0.5, "dp_shard": 1.0}, {})


def test_no_events_have_no_seconds() -> None:
    assert attribute([]) == StepSeconds({}, {}, {})


def test_the_time_of_a_span_is_not_that_of_the_spans_around_it() -> None:
    nested = [
        PhaseEvent("comm", 1.0, 2.0, axis="tp", depth=2),
        PhaseEvent("comm", 3.0, 3.5, axis="cp", depth=2),
        PhaseEvent("backward", 0.5, 4.0, depth=1),
        PhaseEvent("comm", 5.0, 5.25, axis="tp", depth=1),
        PhaseEvent("forward", 0.0, 6.0),
    ]
    phases = {"comm": 1.75, "backward": 2.0, "forward": 2.25}
    assert attribute(nested) == StepSeconds(phases, {"tp": 1.25, "cp": 0.5}, {})


def test_gaps_between_the_stages_of_a_pipeline_are_waits_for_other_stages() -> None:
    schedule = [
        PhaseEvent("forward", 1.0, 2.0, depth=1, stage=0),
        PhaseEvent("forward", 2.0, 2.5, depth=1, stage=3),
        PhaseEvent("comm", 4.25, 4.75, axis="dp_shard", depth=2),
        PhaseEvent("backward", 4.0, 6.0, depth=1, stage=3),
        PhaseEvent("backward", 6.0, 7.5, depth=1, stage=0),
        PhaseEvent("comm", 7.5, 7.75, axis="dp_shard", depth=1),
        PhaseEvent("comm", 0.0, 8.0, axis="pp"),
    ]
    phases = {"forward": 1.5, "backward": 3.0, "comm": 3.5}
    # A stage is busy while it waits for its own weights.
    assert attribute(schedule) == StepSeconds(phases, {"dp_shard": 0.75, "pp": 2.75}, {0: 2.5, 3: 2.5})


def test_a_discarded_lap_does_not_count_but_its_neighbours_do() -> None:
    laps = [PhaseEvent("data", 0.0, 1.0), PhaseEvent(None, 1.0, 9.0), PhaseEvent("forward", 9.0, 10.0)]
    assert attribute(laps).phases == {"data": 1.0, "forward": 1.0}


def test_the_time_of_a_span_that_raised_is_that_of_the_event_around_it() -> None:
    """Recomputation ends with an exception once it has what backward needs; what it waited for is still a wait."""
    failed = [
        PhaseEvent("comm", 2.0, 2.5, axis="tp", depth=3),
        PhaseEvent(None, 1.5, 1.5, axis="cp", depth=2),
        PhaseEvent("forward", 1.0, 3.0, depth=1),
        PhaseEvent("comm", 3.25, 3.5, axis="tp", depth=2),
        PhaseEvent(None, 3.0, 3.0, depth=1),
        PhaseEvent("optimizer", 5.0, 5.5, depth=1),
        PhaseEvent("backward", 0.0, 6.0),
    ]
    phases = {"comm": 0.75, "forward": 1.5, "optimizer": 0.5, "backward": 3.25}
    assert attribute(failed) == StepSeconds(phases, {"tp": 0.75}, {})

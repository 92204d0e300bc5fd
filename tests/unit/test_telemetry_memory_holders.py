"""Summaries of CUDA allocator snapshots in torch's documented format."""

from typing import Any

import pytest

from trimaran.runs import MemoryOwner, downsample, read_snapshot

MIB = 1 << 20
WEIGHT, STATE, ACTIVATION = 0x7F00_0000_0000, 0x7F00_0020_0000, 0x7F00_0040_0000


def frames(*calls: tuple[str, int, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in calls]


ATTENTION = frames(
    ("??", 0, "at::native::mm"),
    ("/x/torch/nn/functional.py", 9, "linear"),
    ("/x/torch/nn/modules/module.py", 1, "_call_impl"),
    ("/repo/nets/decoder.py", 88, "forward"),
)
LOSS = frames(("/repo/train/loss.py", 12, "cross_entropy"))


def snapshot() -> dict[str, Any]:
    """Two segments of device 0, of which 2 + 2 + 1 MiB are held, and one of device 1; the history of a step.

    In the history the loss took 4 MiB for a while, which made the peak of 9 MiB.
    """
    small = {"device": 0, "address": WEIGHT, "total_size": 6 * MIB, "segment_type": "large", "stream": 0, "blocks": [
        {"address": WEIGHT, "size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated", "frames": []},
        {"address": STATE, "size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated", "frames": []},
        {"address": ACTIVATION, "size": MIB, "requested_size": MIB - 100, "state": "active_allocated",
         "frames": ATTENTION},
        {"address": ACTIVATION + MIB, "size": MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]}  # fmt: skip
    free = {"device": 0, "address": 0x7F10_0000_0000, "total_size": 4 * MIB, "segment_type": "large", "stream": 0,
            "blocks": [{"address": 0x7F10_0000_0000, "size": 4 * MIB, "requested_size": 0, "state": "inactive",
                        "frames": []}]}  # fmt: skip
    other = {"device": 1, "address": 0x7F20_0000_0000, "total_size": 8 * MIB, "segment_type": "large", "stream": 0,
             "blocks": [{"address": 0x7F20_0000_0000, "size": 8 * MIB, "requested_size": 8 * MIB,
                         "state": "active_allocated", "frames": []}]}  # fmt: skip
    loss = 0x7F10_0000_0000
    history = [
        {"action": "alloc", "addr": ACTIVATION, "size": MIB, "stream": 0, "time_us": 1_000_000, "frames": ATTENTION},
        {"action": "segment_alloc", "addr": loss, "size": 4 * MIB, "stream": 0, "time_us": 1_000_100, "frames": LOSS},
        {"action": "alloc", "addr": loss, "size": 4 * MIB, "stream": 0, "time_us": 1_000_200, "frames": LOSS},
        {"action": "free_requested", "addr": loss, "size": 4 * MIB, "stream": 0, "time_us": 1_500_000, "frames": []},
        {"action": "free_completed", "addr": loss, "size": 4 * MIB, "stream": 0, "time_us": 1_500_000, "frames": []},
    ]
    return {"segments": [small, free, other], "device_traces": [history, []], "allocator_settings": {}}


OWNERS = [
    MemoryOwner(address=WEIGHT, num_bytes=2 * MIB - 512, kind="parameters", module="layers.0"),
    MemoryOwner(address=STATE, num_bytes=MIB, kind="states", module="layers.0"),
    MemoryOwner(address=STATE + MIB, num_bytes=MIB, kind="states", module="layers.0"),
]


def test_held_memory_has_an_owner_or_a_line_of_code() -> None:
    found = read_snapshot(snapshot(), OWNERS)
    assert (found["allocated"], found["reserved"], found["unknown"]) == (5 * MIB, 10 * MIB, MIB)
    assert found["in_holes"] == MIB  # the empty segment could be freed
    assert found["holders"] == [
        {"kind": "parameters", "module": "layers.0", "bytes": 2 * MIB, "count": 1},
        {"kind": "states", "module": "layers.0", "bytes": 2 * MIB, "count": 1},
    ]
    assert found["lines"] == [
        {"file": "/repo/nets/decoder.py", "line": 88, "function": "forward", "bytes": MIB, "count": 1}
    ]


def test_the_history_has_the_peak_and_its_holders() -> None:
    found = read_snapshot(snapshot(), OWNERS)
    assert [point["allocated"] // MIB for point in found["timeline"]] == [4, 5, 9, 5]
    assert found["timeline"][-1]["seconds"] == pytest.approx(0.5)
    assert (found["peak"]["allocated"], found["peak"]["from_before"]) == (9 * MIB, 4 * MIB)
    assert [(row["function"], row["bytes"]) for row in found["peak"]["lines"]] == [
        ("cross_entropy", 4 * MIB),
        ("forward", MIB),
    ]


def test_without_a_history_there_is_no_peak() -> None:
    bare = snapshot() | {"device_traces": [[], []]}
    assert (read_snapshot(bare, OWNERS)["peak"], read_snapshot(bare, OWNERS)["timeline"]) == (None, [])
    assert read_snapshot({"segments": []}, [])["allocated"] == 0


def test_devices_are_kept_apart() -> None:
    found = read_snapshot(snapshot(), OWNERS, device=1)
    assert (found["allocated"], found["holders"], found["unknown"]) == (8 * MIB, [], 8 * MIB)


def test_downsampling_keeps_the_highest_and_the_lowest_points() -> None:
    points = [(float(i), 500) for i in range(100_000)]
    points[31_337], points[77_777] = (31_337.0, 9000), (77_777.0, 1)
    kept = downsample(points)
    assert len(kept) <= 1001
    assert {(31_337.0, 9000), (77_777.0, 1)} <= {*kept}
    assert [each[0] for each in kept] == sorted(each[0] for each in kept)

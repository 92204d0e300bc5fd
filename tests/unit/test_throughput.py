"""`benchmarks/throughput.py`: the order of peers, the text of results, and one real round on the CPU."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers.contests import CONTESTS, works
from benchmarks.peers.table import speed, tables, windows
from benchmarks.peers.work import SHAPES, Work, draw_row
from benchmarks.throughput import TINY, in_turn, measure_all, read, wanted, with_settings

from trimaran.core import ModelSection
from trimaran.models import ModelSpec, spec_of

QUICK: dict[str, Any] = TINY | {"compile": False, "warm": 2, "windows": 2, "steps": 2, "micro_batch": 2}


def line(peer: str, seconds: list[float], **changes: Any) -> dict[str, Any]:
    record = {"contest": "1b", "peer": peer, "model": "1b", "seconds": seconds, "window": 2, "tokens_per_step": 1000}
    record |= {"peak_bytes": 3 * 2**30, "reserved_bytes": 4 * 2**30, "first_loss": 11.8, "last_loss": 11.7}
    record |= {"start_seconds": 12.0, "version": "1.0", "note": "", "device": "a GPU", "torch": "2.11"}
    return record | changes


def test_a_window_is_timed_as_a_whole() -> None:
    assert windows(line("loop", [0.5, 1.5, 1.0, 3.0])) == [1000.0, 500.0]


def test_a_speed_is_the_median_over_the_windows_of_all_rounds() -> None:
    assert speed([line("loop", [1.0, 1.0, 2.0, 2.0]), line("loop", [0.5, 0.5])]) == 1000.0


def test_a_table_has_ratios_to_the_reference_and_the_reason_of_a_failure() -> None:
    records = [line("torchtitan", [1.0, 1.0]), line("trimaran", [0.8, 0.8], note="plan x")]
    records.append({"contest": "1b", "peer": "loop", "failed": "OutOfMemoryError: none left"})
    table = tables(records)
    row = "| trimaran | 1,250 | 1,250 - 1,250 | 1.250 | 3.0 | 4.0 | 12 | 11.800 -> 11.700 | 1 | 800.00 | 800.00 |  |"
    assert row in table
    assert "of the best other, torchtitan: trimaran 1.250" in table
    assert "| loop | OutOfMemoryError: none left |" in table
    assert "trimaran: 1.0 (plan x)" in table


def test_fp8_is_compared_with_bf16_of_the_other_contest_too() -> None:
    records = [line("torchtitan", [1.0, 1.0], contest="3b"), line("trimaran", [0.5, 0.5], contest="3b-fp8")]
    assert "of torchtitan in 3b: trimaran 2.000" in tables(records)


def test_peers_take_turns_and_every_other_round_runs_backwards() -> None:
    first, second = list(works("hf-1b", CONTESTS["hf-1b"], {}).values())
    assert list(in_turn([first, second], 3)) == [first, second, second, first, first, second]


def test_an_extra_peer_runs_only_when_it_is_named() -> None:
    assert "torchtitan+auto" not in [work.peer for work in wanted("3b-fp8", {})["3b-fp8"]]
    (work,) = wanted("3b-fp8/torchtitan+auto", {})["3b-fp8"]
    assert work.options["filter"] == ["output", "auto_filter_small_kn"]


@pytest.mark.parametrize("word", ["2b", "1b/deepspeed"])
def test_an_unknown_contest_or_peer_is_refused_by_name(word: str) -> None:
    with pytest.raises(SystemExit, match=word):
        wanted(word, {})


def test_only_trimaran_takes_settings() -> None:
    for work in works("1b", CONTESTS["1b"], {}).values():
        changed = with_settings(work, ["plan.loss=fused"])
        assert changed.options == work.options | ({"set": ["plan.loss=fused"]} if work.peer == "trimaran" else {})


@pytest.mark.parametrize("name", CONTESTS)
def test_a_contest_refers_to_its_own_peers_and_its_work_can_be_serialized(name: str) -> None:
    contest = CONTESTS[name]
    assert {contest.reference, *contest.extra} <= contest.peers.keys()
    for work in works(name, contest, {}).values():
        assert Work.read(json.loads(json.dumps(work.fields()))) == work


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.50), ("3b", 3.61), ("8b", 8.03)])
def test_trimaran_reads_the_shape_that_the_peers_read(name: str, billions: float, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config(4096)))
    spec = spec_of(ModelSection(path=str(tmp_path)))
    assert isinstance(spec, ModelSpec)
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.vocab, spec.head_dim, spec.tied) == (
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, shape.head_dim, False
    )  # fmt: skip
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_row_depends_only_on_its_number() -> None:
    work = works("1b", CONTESTS["1b"], TINY)["loop"]
    assert np.array_equal(draw_row(work, 7), draw_row(work, 7))
    assert not np.array_equal(draw_row(work, 7), draw_row(work, 8))
    assert draw_row(work, 7).max() < work.model.vocab == 512


@pytest.mark.slow  # three processes import torch
def test_real_peers_train_the_same_work_and_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    peers = works("1b", CONTESTS["1b"], QUICK)
    odd = Work.read(peers["loop"].fields() | {"shape": "no such shape"})
    left = measure_all(
        [peers["loop"], odd, peers["trimaran"]], tmp_path / "out.jsonl", tmp_path, seconds=600, limit=300
    )
    loop, failed, ours = read([tmp_path / "out.jsonl"])
    assert left == []
    assert "no such shape" in failed["failed"]
    assert [loop["peer"], ours["peer"]] == ["loop", "trimaran"]
    for record in (loop, ours):
        assert len(record["seconds"]) == 4
        assert record["first_loss"] == pytest.approx(math.log(512), abs=0.2)
        assert record["start_seconds"] > 0
    assert '"precision": "bf16"' in ours["note"]


def test_no_peer_starts_when_the_time_is_up(tmp_path: Path) -> None:
    work = works("1b", CONTESTS["1b"], QUICK)["loop"]
    assert measure_all([work], tmp_path / "out.jsonl", tmp_path, seconds=0, limit=60) == [work]
    assert not (tmp_path / "out.jsonl").exists()

"""A killed rank of a run with an adapter: the adapter comes back from memory, the base from its files."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.test_adapter_checkpoints import base, work
from tests.fault.harness import Supervised
from tests.ranks import run_ranks
from trimaran.core import EXIT_DONE
from trimaran.data import cache_folder
from trimaran.runs import create_run

__all__ = ["base"]  # a fixture


@pytest.mark.chaos
def test_a_killed_rank_restores_the_adapter_from_memory(base: Path, tmp_path: Path) -> None:
    settings = (
        f"model={{path: {base}, adapter: {{rank: 4}}}}",
        "data.tokenizer=bytes",
        "train.steps=20",
        "checkpoint.memory=1",
    )
    with Supervised.start(tmp_path / "run", *settings, fault="kill:1:8:0", pause=0.01) as supervised:
        assert supervised.wait() == EXIT_DONE
    assert [each.action for each in supervised.faults] == ["restarted"]
    events = [json.loads(line) for line in supervised.run.events(0).read_text().splitlines()]
    (resumed,) = [each for each in events if each["kind"] == "resume"]
    assert (resumed["data"]["tier"], resumed["data"]["refused"]) == ("memory", [])
    assert resumed["step"] >= 7
    calm = create_run(tmp_path / "calm", supervised.run.read_recipe(), supervised.run.read_plan())
    assert run_ranks(2, work, calm.path, cache_folder(os.environ)) == [0, 0]
    ours, theirs = (load_file(run.model / "adapter_model.safetensors") for run in (supervised.run, calm))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)

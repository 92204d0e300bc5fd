"""The environment of local ranks and the signals of their supervisor."""

import os
import signal
from typing import Any

import pytest

from trimaran.core import Plan
from trimaran.launch import HANDLED_SIGNALS, SIGNAL_TEXTS, Signals
from trimaran.runs import allocator_settings, worker_environment

SHARDED = Plan.model_validate({"mesh": {"dp_shard": 2}, "sharding": "parameters"})


def environment(plan: Plan, *, on_cpu: bool = False, **outer: str) -> dict[str, str]:
    return outer | worker_environment(outer, plan, on_cpu=on_cpu, deterministic=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": {"dp_shard": 2}, "sharding": "optimizer"},
        {"mesh": {"pp": 2}},
        {"recompute": "full"},
        {"recompute": 2},
        {"offload": "activations"},
    ],
)
def test_plans_that_fragment_memory_get_expandable_segments(fields: dict[str, Any]) -> None:
    settings = allocator_settings(Plan.model_validate(fields))
    assert settings == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert settings.items() <= environment(Plan.model_validate(fields)).items()


def test_plain_plans_and_cpus_get_no_allocator_settings() -> None:
    assert allocator_settings(Plan.model_validate({"mesh": {"dp_replicate": 8, "tp": 2}, "grad_accum": 4})) == {}
    assert "PYTORCH_ALLOC_CONF" not in environment(SHARDED, on_cpu=True)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_setting_wins_under_either_name(name: str) -> None:
    outer: dict[str, Any] = {name: "max_split_size_mb:512"}
    mine = environment(SHARDED, **outer)
    assert {key: value for key, value in mine.items() if "ALLOC_CONF" in key} == {name: "max_split_size_mb:512"}


def test_deepspeed_gets_the_cpu_accelerator() -> None:
    plan = Plan(engine="deepspeed")
    assert environment(plan, on_cpu=True)["DS_ACCELERATOR"] == "cpu"
    assert environment(plan, on_cpu=True, DS_ACCELERATOR="mine")["DS_ACCELERATOR"] == "mine"
    assert "DS_ACCELERATOR" not in environment(plan)
    assert "DS_ACCELERATOR" not in environment(Plan(), on_cpu=True)


def test_ranks_share_the_cores_and_a_cpu_run_sees_no_gpu() -> None:
    many = environment(Plan.model_validate({"mesh": {"tp": 64, "pp": 2}}), on_cpu=True, CUDA_VISIBLE_DEVICES="0,1")
    assert (many["OMP_NUM_THREADS"], many["CUDA_VISIBLE_DEVICES"]) == ("1", "")


@pytest.mark.parametrize(
    ("sent", "kill"),
    [
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT], True),
        ([signal.SIGHUP], False),
        ([signal.SIGQUIT], True),
    ],
)
def test_repeated_sigterms_request_one_stop_and_a_second_sigint_a_kill(sent: list[signal.Signals], kill: bool) -> None:
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    signals = Signals()
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if these tests run under `nohup`
        signals.listen()
        for number in sent:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (signals.stop_requested, signals.kill_requested, signals.name) == (
        True,
        kill,
        SIGNAL_TEXTS.get(sent[-1], sent[-1].name),
    )

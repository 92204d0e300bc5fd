"""Small steps: the device waits for its host, unless a step is captured, and for the gaps between its kernels."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import DataSection, ModelSection, Plan, Recipe, Seconds
from trimaran.cost import (
    HF_MODELS,
    KERNEL_GAP_SECONDS,
    STACKS,
    TRIMARAN_HOST,
    TRIMARAN_LAUNCHES,
    HostOverhead,
    Job,
    Stack,
    host_wait,
    predict,
)
from trimaran.machine import Calibration, Cluster, apply_calibration, parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question

SHAPE = {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 704, "vocab": 32_000}
SMALL = outline_of(replace(PRESETS["tiny"], **SHAPE, tied=False))
LARGE = outline_of(PRESETS["llama-3.2-1b"])
H200 = parse_cluster("1xH200")
# Host time of a compiled micro-batch of SMALL, and of the rest of the step.
MICRO_BATCH, REST = 8 * TRIMARAN_HOST.compiled + TRIMARAN_HOST.micro_batch, TRIMARAN_HOST.step


def seconds(job: Job, cluster: Cluster = H200, **plan: Any) -> float:
    fields = {"precision": "bf16", "compile": True, "loss": "fused"} | plan
    return predict(job, cluster, Plan.model_validate(fields)).step_seconds


def small(seq_len: int = 1024, **fields: Any) -> Job:
    return Job(outline=SMALL, seq_len=seq_len, **fields)


def test_a_step_that_is_not_captured_takes_as_long_as_its_host() -> None:
    for seq_len in (128, 1024):  # the tokens do not matter
        assert seconds(small(seq_len), cuda_graphs=False) == pytest.approx(MICRO_BATCH + REST, rel=0.01)
    accumulated = seconds(small(128), cuda_graphs=False, grad_accum=4)
    assert accumulated == pytest.approx(4 * MICRO_BATCH + REST, rel=0.01)
    assert seconds(small(128), cuda_graphs=False, compile=False) > 1.05 * seconds(small(128), cuda_graphs=False)


def test_a_captured_step_takes_as_long_as_its_device() -> None:
    captured, launched = seconds(small(), micro_batch=16), seconds(small(), micro_batch=16, cuda_graphs=False)
    assert captured < 0.5 * launched
    assert seconds(small(), micro_batch=32) > 1.5 * captured


def test_kernels_do_not_start_at_once() -> None:
    """Without a host, gaps between kernels are left: their number does not depend on the tokens."""
    launches = 8 * TRIMARAN_LAUNCHES.compiled + TRIMARAN_LAUNCHES.micro_batch + TRIMARAN_LAUNCHES.step
    nothing = HostOverhead(Seconds(0.0), Seconds(0.0), Seconds(0.0), runs_ahead=True)
    with_gaps, without = (
        replace(STACKS["trimaran"], time=replace(STACKS["trimaran"].time, host=each))
        for each in (nothing._replace(launches=TRIMARAN_LAUNCHES), nothing)
    )
    for micro_batch in (1, 16):
        gaps, bare = (seconds(small(stack=each), micro_batch=micro_batch) for each in (with_gaps, without))
        assert gaps - bare == pytest.approx(launches * KERNEL_GAP_SECONDS)


def test_a_large_step_does_not_wait_for_its_host() -> None:
    job = Job(outline=LARGE, seq_len=4096)
    assert seconds(job, micro_batch=4, cuda_graphs=False) == pytest.approx(seconds(job, micro_batch=4), rel=0.01)


def test_host_and_device_overlap_over_the_whole_step() -> None:
    """The host runs ahead, so a slow update of the host is hidden by a long backward of the device."""
    slow = TRIMARAN_HOST._replace(step=Seconds(0.1))
    stack = replace(STACKS["trimaran"], time=replace(STACKS["trimaran"].time, host=slow))
    job = Job(outline=LARGE, seq_len=4096)
    assert seconds(job, micro_batch=4) == pytest.approx(seconds(replace(job, stack=stack), micro_batch=4), rel=0.01)
    assert host_wait(1.0, 0.0) == 0.0
    assert host_wait(0.0, 1.0) == 1.0
    assert host_wait(1.0, 3.0) == pytest.approx(2.0, rel=0.01)


def test_the_wait_is_part_of_the_phases_in_which_the_host_works() -> None:
    plan = Plan(precision="bf16", compile=True, loss="fused", cuda_graphs=False)
    time = predict(small(128), H200, plan).time
    assert time["optimizer"] == pytest.approx(REST, rel=0.05)
    assert time["forward"] < time["backward"]
    assert sum(time.values()) == pytest.approx(MICRO_BATCH + REST, rel=0.01)


def test_a_slow_host_makes_only_steps_slower_that_wait_for_it() -> None:
    slow = apply_calibration(H200, Calibration(launch_us=14.0))  # twice the default
    assert slow.device.launch_seconds == 14e-6
    waiting = {"micro_batch": 1, "cuda_graphs": False}
    assert seconds(small(), slow, **waiting) == pytest.approx(2 * seconds(small(), **waiting), rel=0.01)
    assert seconds(small(), slow, micro_batch=64) == pytest.approx(seconds(small(), micro_batch=64), rel=0.02)
    core = parse_cluster("1xcpu")
    measured = apply_calibration(core, Calibration(launch_us=1.0))
    assert measured.device.launch_seconds == core.device.launch_seconds  # a CPU is its own host


def question(**fields: Any) -> Question:
    model = ModelSection.model_validate({"family": "decoder"} | fields.pop("model", {}))
    recipe = Recipe(model=model, data=DataSection.model_validate(fields.pop("data", {})))
    return Question(recipe=recipe, spec=None, outline=SMALL, cluster=H200, **fields)


def test_only_batches_of_one_shape_are_captured() -> None:
    assert question().job.can_capture
    others: list[dict[str, Any]] = [
        {"data": {"isolate_documents": True}},
        {"data": {"source": "chat", "path": "chat.jsonl"}},
        {"model": {"family": "vlm"}},
    ]
    assert not question(model={"family": "hf", "trust_remote_code": True}).job.can_capture
    for each in others:
        job = question(**each).job
        assert not job.can_capture
        assert seconds(job, micro_batch=2) == seconds(question().job, micro_batch=2, cuda_graphs=False)


def test_a_hugging_face_model_has_its_own_overhead() -> None:
    assert question(model={"family": "hf"}).job.stack is HF_MODELS
    titan: Stack = STACKS["torchtitan"]
    assert question(model={"family": "hf"}, stack=titan).job.stack is titan
    plain, hf = (seconds(small(128, stack=each), cuda_graphs=False) for each in (STACKS["trimaran"], HF_MODELS))
    assert hf < plain


@pytest.mark.parametrize(
    "plan", [{"mesh": {"dp_shard": 2}, "sharding": "parameters"}, {"mesh": {"dp_replicate": 2}}, {"mesh": {"pp": 2}}]
)
def test_several_ranks_wait_for_their_hosts(plan: dict[str, Any]) -> None:
    two = parse_cluster("2xH200")
    per_rank = MICRO_BATCH / (2 if "pp" in plan["mesh"] else 1)
    found = seconds(small(128), two, **plan)
    assert found > per_rank
    if "sharding" in plan:
        # Eight small blocks share a unit; the other one has embedding and head.
        assert found == pytest.approx(MICRO_BATCH + REST + 2 * TRIMARAN_HOST.unit, rel=0.02)
        apart = seconds(small(128), two, **plan, comm={"bucket_mb": 1})
        assert apart == pytest.approx(found + 7 * TRIMARAN_HOST.unit, rel=0.02)


def test_joined_blocks_gather_and_hold_more_at_once() -> None:
    two, plan = parse_cluster("2xH200"), {"mesh": {"dp_shard": 2}, "sharding": "parameters", "precision": "bf16"}
    joined, apart = (
        predict(small(128), two, Plan.model_validate(plan | {"comm": {"bucket_mb": size}})) for size in (25, 1)
    )
    assert joined.memory["gathered"] > apart.memory["gathered"]
    hf = replace(small(128), stack=HF_MODELS)
    of_hf = [predict(hf, two, Plan.model_validate(plan | {"comm": {"bucket_mb": size}})) for size in (25, 1)]
    assert of_hf[0].step_seconds == of_hf[1].step_seconds, "only our own decoder's blocks are joined"


def test_replicas_that_reduce_after_backward_are_captured_and_hide_nothing() -> None:
    two = parse_cluster("2xH200")
    for job, is_faster in ((small(128), True), (Job(outline=LARGE, seq_len=4096), False)):
        during, after = (
            seconds(job, two, mesh={"dp_replicate": 2}, comm={"overlap": each}, micro_batch=2) for each in (True, False)
        )
        assert (after < during) == is_faster


def test_a_cpu_has_no_launches() -> None:
    core = parse_cluster("1xcpu")
    plans = [Plan(micro_batch=2, cuda_graphs=each) for each in (True, False)]
    assert len({predict(small(128), core, plan).step_seconds for plan in plans}) == 1


def test_graphs_need_little_memory_of_their_own() -> None:
    plan = Plan(precision="bf16", compile=True, loss="fused", micro_batch=16)
    captured, launched = (
        predict(small(), H200, each) for each in (plan, plan.model_copy(update={"cuda_graphs": False}))
    )
    assert captured.peak_bytes == launched.peak_bytes
    assert 0 < captured.device_bytes - launched.device_bytes < 2**27

"""Health rules on lines of real runs: a finding if something is wrong, none if not."""

from functools import cache
from typing import Any

import pytest

from trimaran.core import Comm, Finding, Plan, Recipe, parse_recipe
from trimaran.doctor import RULES, Evidence, apply_patch, diagnose, read_planner_inputs
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose

# Every fourth loss of two runs of the tiny decoder, at learning rates of 1e-3 and 1.0, and update ratios by group.
FALLING = [5.52, 5.4, 5.12, 4.79, 4.53, 4.36, 4.12, 3.94, 3.94, 3.9]
RISING = [5.52, 10.9, 10.57, 19.92, 11.84, 12.01, 8.34, 5.04, 4.43, 3.77]
GOOD_RATIOS = {"embed_tokens": 0.0208, "layers.0": 0.0039, "layers.1": 0.0034, "layers.2": 0.003, "norm": 0.00056}
LARGE_RATIOS = {"embed_tokens": 0.7, "layers.0": 0.8568, "layers.1": 0.4675, "layers.2": 0.2609, "norm": 0.99}
NORMS = {"embed_tokens": 2.096, "layers.0": 0.129, "layers.1": 0.105, "layers.2": 0.096, "norm": 0.154}


def recipe_with(*settings: str) -> Recipe:
    return parse_recipe("", name="test", overrides=["train.steps=40", "cluster=2xcpu", *settings])


RECIPE = recipe_with("model.preset=tiny", "train.global_batch=32", "plan.micro_batch=16", "plan.grad_accum=1")
PLAN = choose(RECIPE, spec_of(RECIPE.model), parse_cluster("2xcpu"), outline_if_known(RECIPE.model, RECIPE.data))


def step(number: int, *, loss: float | None, **keys: Any) -> dict[str, Any]:
    return {"step": number, "loss": loss, "grad_norm": 2.0, "lr": 1e-3, "step_seconds": 0.1, "phases": {}} | keys


def steps(losses: list[float], ratios: dict[str, float] | None = None, **keys: Any) -> tuple[dict[str, Any], ...]:
    """Return four steps for each loss; every second has group metrics."""
    groups = {name: {"update_ratio": ratio, "grad_norm": NORMS[name]} for name, ratio in (ratios or {}).items()}
    details = [keys, keys | {"groups": groups}] if groups else [keys, keys]
    return tuple(step(number + 1, loss=losses[number // 4], **details[number % 2]) for number in range(4 * len(losses)))


def event(kind: str, *, at: int = 3, rank: int = 0, **data: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "time": 1.0, "step": at, "attempt": 0, "data": data}


def incident(cause: str, what: str, **known: Any) -> dict[str, Any]:
    tree = {"id": "i-0001", "cause": cause, "time": 1.0, "what": what, "step": 6, "suspects": [1], "victims": [0]}
    return tree | {"evidence": {}, "action": "restarted", "cost": {}} | known


def gpu(**keys: Any) -> dict[str, Any]:
    healthy = {"index": 3, "temperature": 64, "sm_clock": 1.9e9, "sm_clock_max": 1.98e9, "throttle": ["power_cap"]}
    return healthy | {"ecc_uncorrected": 0} | keys


def sample(at: float = 0.0, **keys: Any) -> dict[str, Any]:
    healthy = {"ram_used": 20 << 30, "ram": 64 << 30, "swap_used": 0, "disk_free": 500 << 30, "gpus": []}
    return {"time": at, "node": 0, "host": "node-a"} | healthy | keys


def evidence(recipe: Recipe = RECIPE, plan: Plan = PLAN, **lines: Any) -> Evidence:
    inputs = cache(lambda: read_planner_inputs(recipe, plan))
    fields: dict[str, Any] = {"steps": steps(FALLING, GOOD_RATIOS)} | lines
    return Evidence(recipe=recipe, plan=plan, planner_inputs=inputs, **fields)


def health_findings(evidence: Evidence) -> list[Finding]:
    """Return the findings about health, not speed: their codes start at F050."""
    return [each for rule in RULES for each in rule(evidence) if each.code >= "F050"]


def only(code: str, **lines: Any) -> Finding:
    """Return the only finding of the health rules for these lines. It must have a valid patch or a fix."""
    found = evidence(**lines)
    (finding,) = health_findings(found)
    assert finding.code == code
    assert finding.patch or finding.fix
    apply_patch(found.recipe, finding.patch)
    return finding


def test_a_healthy_run_gets_no_finding() -> None:
    samples = [sample(at, gpus=[gpu()]) for at in range(0, 600, 5)]
    started = [event("started", rank=rank, seconds=1.0) for rank in range(2)]
    memory = {"allocated": 60 << 30, "reserved": 66 << 30, "fragmentation": 0.03, "retries": 0, "total": 80 << 30}
    calm = evidence(
        steps=steps(FALLING, GOOD_RATIOS, memory=memory, peak_bytes=62 << 30), samples=samples, events=started
    )
    assert health_findings(calm) == []
    assert diagnose(evidence(steps=())) == []  # nor does an empty run


ORIGIN = {"module": "layers.1.mlp", "what": "output", "rank": 1, "ranks": [1]}


@pytest.mark.parametrize(
    ("precision", "origin", "culprit", "patch"),
    [
        ("fp32", ORIGIN, "layers.1.mlp on rank 1", {"faults.not_finite": "rewind"}),
        ("fp16", ORIGIN, "layers.1.mlp on rank 1", {"plan.precision": "bf16"}),
        ("fp32", ORIGIN | {"what": "weight", "module": "norm.weight"}, "norm.weight on rank 1", {}),
        ("fp32", {"module": "", "what": "not again", "rank": None}, "rank 1", {}),
        ("fp32", {}, "rank 1", {"faults.not_finite": "rewind"}),
    ],
)
def test_a_nan_is_reported_with_its_module_and_rank(
    precision: str, origin: dict[str, Any], culprit: str, patch: dict[str, Any]
) -> None:
    data: dict[str, Any] = {"reason": "the loss is nan", "loss": None, "grad_norm": None}
    data |= {"ranks": [1], "sample_ids": [7, 9]} | ({"born": origin} if origin else {})
    skip = event("skip", **data)
    found = only("F050", plan=PLAN.model_copy(update={"precision": precision}), events=(skip,))
    assert (found.culprit, found.patch, found.severity) == (culprit, patch, "fault")
    assert "at step 3" in found.verdict


def test_a_nan_that_another_rank_does_not_get_from_the_same_batch_is_blamed_on_the_device() -> None:
    data: dict[str, Any] = {"reason": "the loss is nan", "loss": None, "grad_norm": None, "ranks": [1], "born": ORIGIN}
    verdict = "the same batch is finite on rank 0: suspect the device of rank 1, not the data"
    reproduced = {"on_rank": 0, "again": False, "same_device": False, "verdict": verdict}
    found = only("F050", events=(event("skip", **data, reproduced=reproduced),))
    assert verdict in found.verdict
    assert found.patch == {}
    assert "suspect the hardware of rank 1" in found.fix
    from_data = only("F050", events=(event("skip", **data, reproduced=reproduced | {"again": True}),))
    assert from_data.patch == {"faults.not_finite": "rewind"}


def test_a_loss_spike_is_reported_whether_its_update_was_skipped_or_applied() -> None:
    data = {"reason": "the loss jumped from 2.3 to 2300", "loss": 2300.0, "grad_norm": 9.0, "ranks": [1]}
    skipped = only("F051", events=(event("skip", **data, sample_ids=[4]),))
    assert (skipped.culprit, skipped.patch) == ("rank 1", {"faults.not_finite": "rewind"})
    applied = only("F051", steps=(*steps(FALLING, GOOD_RATIOS), step(41, loss=9.7)))
    assert applied.patch == {"train.lr": 5e-4}
    assert "step 41, from 3.94 to 9.7" in applied.verdict


def test_a_learning_rate_too_high_or_too_low_gets_a_better_one() -> None:
    high = only("F056", recipe=recipe_with("train.lr=1.0"), steps=steps(RISING, LARGE_RATIOS, lr=1.0))
    assert high.culprit == "train.lr 1, most in norm"
    assert high.patch == {"train.lr": 0.03}
    fast = only("F056", steps=steps(FALLING, dict.fromkeys(GOOD_RATIOS, 0.25)))  # even if the loss falls
    assert fast.patch == {"train.lr": 8e-5}
    flat = [5.56, 5.6, 5.56, 5.56, 5.57, 5.6, 5.6, 5.55, 5.51, 5.61]
    tiny = dict.fromkeys(GOOD_RATIOS, 1e-7)
    low = only("F057", recipe=recipe_with("train.lr=1e-8"), steps=steps(flat, tiny, lr=1e-8))
    assert low.patch == {"train.lr": 1e-4}


def test_a_loss_that_rises_without_warm_up_is_reported() -> None:
    recipe = recipe_with("train.schedule.warmup_steps=0")
    found = only("F058", recipe=recipe, steps=steps([5.52, 5.9, 5.7, 5.5, 5.2, 4.9], GOOD_RATIOS))
    assert found.patch == {"train.schedule.warmup_steps": 10}


def test_exploding_and_vanishing_gradients_are_reported_with_the_group() -> None:
    growing = tuple(step(number + 1, loss=4.0, grad_norm=0.8 * 1.3**number) for number in range(30))
    found = only("F052", steps=growing)
    assert found.patch == {"train.lr": 1e-4}
    unclipped = only("F052", recipe=recipe_with("train.clip_norm=0"), steps=growing)
    assert unclipped.patch == {"train.clip_norm": 1.0}
    norms = {"layers.0": {"grad_norm": 3e-9, "update_ratio": 1e-3}, "lm_head": {"grad_norm": 1.2, "update_ratio": 1e-3}}
    vanishing = only("F053", steps=tuple(step(number, loss=4.0, groups=norms) for number in range(1, 6)))
    assert (vanishing.culprit, vanishing.patch) == ("layers.0", {})


def test_a_collapsing_loss_scale_is_reported_and_its_initial_search_is_not() -> None:
    fp16 = PLAN.model_copy(update={"precision": "fp16"})
    collapsing = tuple(
        step(number, loss=4.0, grad_norm=None, skipped=True, loss_scale=2.0 ** (17 - number)) for number in range(1, 18)
    )
    found = only("F054", plan=fp16, steps=collapsing)
    assert (found.patch, found.severity) == ({"plan.precision": "bf16"}, "warning")
    ended = only("F054", plan=fp16, steps=collapsing, events=(event("error", code="P030", what="not finite"),))
    assert ended.severity == "fault"
    settling = (*collapsing[:4], *(step(number, loss=4.0, loss_scale=4096.0) for number in range(5, 30)))
    assert health_findings(evidence(plan=fp16, steps=settling)) == []


def test_parameters_without_a_gradient_are_named() -> None:
    events = [event("started", at=1, rank=rank, unused=["layers.1.spare.weight"]) for rank in range(2)]
    assert only("F055", events=events).culprit == "layers.1.spare"


def test_fragmented_and_full_memory_get_a_plan_with_less_memory() -> None:
    memory = {"reserved": 71 << 30, "fragmentation": 0.34, "total": 79 << 30}
    fragmented = tuple(step(n, loss=4.0, memory=memory | {"retries": n // 8}) for n in range(1, 101))
    first = only("F060", steps=fragmented)
    assert first.patch == {"faults.expandable_segments": True}
    assert first.gain is not None
    assert 0 < first.gain <= 0.2
    second = only("F060", recipe=apply_patch(RECIPE, first.patch), steps=fragmented)
    assert second.patch
    assert all(name.startswith("plan.") for name in second.patch)
    full = tuple(step(n, loss=4.0, memory=memory | {"fragmentation": 0.01}, peak_bytes=77 << 30) for n in range(1, 30))
    found = only("F061", steps=full)
    assert found.patch
    assert found.gain is not None
    assert found.culprit == "the device of rank 0"


def test_out_of_memory_gets_the_cheapest_plan_that_fits() -> None:
    what = "rank 1 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB"
    found = only("F062", incidents=(incident("oom", what, action="stopped"),))
    assert (found.culprit, found.severity) == ("rank 1", "fault")
    assert found.patch
    assert apply_patch(RECIPE, found.patch).plan != RECIPE.plan
    assert "instead of" in found.expected_effect
    snapshot = {"rank": 1, "file": "memory-step-00000006-rank-1.json", "oom": {"wanted": 7 << 30}, "time": 1.0}
    holders = [{"kind": "activations", "module": "layers.0", "bytes": 18 << 30, "count": 5}]
    held = only("F062", incidents=(incident("oom", what),), snapshots=(snapshot | {"holders": holders},))
    assert "activations of layers.0 held most, 18.0 GiB" in held.verdict
    replanned = only(
        "F062", incidents=(incident("oom", what, action="replanned", evidence={"why": "micro-batch 16 -> 8"}),)
    )
    assert replanned.patch["plan.micro_batch"] == PLAN.micro_batch


def test_an_adapter_is_proposed_where_no_plan_has_enough_memory() -> None:
    sizes = ("data.seq_len=2048", "train.global_batch=4", "cluster=1xA100-40GB")
    recipe = recipe_with("model.preset=llama-3.1-8b", *sizes)
    fields = {"grad_accum": 4, "precision": "bf16", "recompute": "full", "offload": "optimizer", "loss": "chunked"}
    plan = Plan.model_validate(fields)
    oom = (incident("oom", "rank 0 raised OutOfMemoryError", action="stopped", suspects=[0]),)
    found = only("F062", recipe=recipe, plan=plan, incidents=oom)
    assert found.patch == {"model.adapter": {"kind": "lora", "rank": 16}}
    assert apply_patch(recipe, found.patch).model.adapter is not None
    assert found.expected_effect.startswith("this trains an adapter of rank 16, not the whole model; ")
    assert "GiB instead of" in found.expected_effect
    assert (found.gain, found.fix) == (None, "use more or larger devices, shorter sequences or a smaller model")
    larger = recipe_with("model.preset=qwen2.5-32b", *sizes)
    packed = only("F062", recipe=larger, plan=plan, incidents=oom)
    assert packed.patch == {"model.adapter": {"kind": "lora", "rank": 16, "base": "4bit"}}
    adapted = recipe_with("model.preset=qwen2.5-32b", "model.adapter.kind=lora", *sizes)
    assert only("F062", recipe=adapted, plan=plan, incidents=oom).patch == {"model.adapter.base": "4bit"}
    beyond = recipe_with("model.preset=llama-3.1-405b", *sizes)
    assert only("F062", recipe=beyond, plan=plan, incidents=oom).patch == {}


@pytest.mark.parametrize(
    ("code", "cause", "what", "evidence_of"),
    [
        ("F063", "hang", "rank 1 makes no progress and waits for no other rank", {"facts": ["rank 1 is at a.py:3"]}),
        (
            "F064",
            "mismatch",
            "rank 0 called all_reduce [7], but rank 1 called barrier",
            {"sites": {"1": "is at a.py:3"}},
        ),
        ("F065", "crash", "rank 1 died of SIGABRT", {}),
        ("F065", "exit", "rank 1 exited with code 0 before training was done", {}),
        ("F067", "network", "ranks 0 and 1 lost their connection, and no rank had failed before", {}),
    ],
)
def test_incidents_become_findings_with_the_rank_at_fault(
    code: str, cause: str, what: str, evidence_of: dict[str, Any]
) -> None:
    first = incident(cause, "nothing is known yet", suspects=[], action=None)
    found = only(code, incidents=(first, incident(cause, what, evidence=evidence_of)))
    assert (found.culprit, found.severity) == ("rank 1", "warning")
    assert what in found.verdict
    ended = only(code, incidents=(incident(cause, what, action="stopped"),))
    assert ended.severity == "fault"


def test_a_hang_that_the_run_later_got_past_is_not_said_to_come_back() -> None:
    hung = incident("hang", "rank 1 made no progress", step=8)
    before = only("F063", incidents=(hung,), steps=())
    assert (before.confidence, "may hang there again" in before.expected_effect) == (0.9, True)
    passed = {
        "new steps": {},
        "the end": {"steps": (), "attempts": ({"over": 0, "why": "all steps are done"},)},
        "a done event": {"steps": (), "events": ({"kind": "done", "rank": 0, "attempt": 1, "step": 8, "data": {}},)},
    }
    for what, more in passed.items():
        later = only("F063", incidents=(hung,), **more)
        assert "need not come back" in later.expected_effect, what
        assert later.confidence < 0.5, what


def test_attempts_without_progress_are_counted() -> None:
    ends = [{"attempt": n, "ended": float(n), "how": "trouble", "step": 6} for n in range(3)]
    found = {each.code: each for each in health_findings(evidence(
        attempts=ends, incidents=[incident("crash", "rank 1 was killed by SIGKILL", id=f"i-{n}") for n in range(3)]
    ))}  # fmt: skip
    assert found.keys() == {"F065", "F066"}
    assert (found["F066"].culprit, found["F066"].patch) == ("rank 1", {"faults.ranks": [1, 2]})
    assert "last 2 attempts" in found["F066"].verdict  # the first reached step 6
    progressing = [{"attempt": n, "ended": float(n), "how": "trouble", "step": 6 + n} for n in range(3)]
    assert health_findings(evidence(attempts=progressing)) == []


def test_checkpoints_that_do_not_reach_the_object_store_are_reported() -> None:
    done = event("upload", at=10, url="s3://bucket/run", seconds=70.0, bytes=9, skipped=2)
    lost = event("upload", at=20, url="s3://bucket/run", failed="connection refused")
    found = only("F074", events=(done, lost))
    assert found.verdict == (
        "the last checkpoint is not in s3://bucket/run: connection refused; "
        "the newest checkpoint there is that of step 10"
    )
    assert "no checkpoint of this run is there" in only("F074", events=(lost,)).verdict
    waiting = event("upload", at=20, url="s3://bucket/run", sent=0.4)
    assert health_findings(evidence(events=(lost, done, waiting))) == []
    slow = only("F074", events=(done, done, waiting))
    assert (slow.severity, slow.evidence["skipped"]) == ("note", 4)


def test_disks_that_are_full_or_fill_up_are_reported() -> None:
    saved = event("checkpoint", bytes=300 << 20)
    full = only("F068", samples=(sample(disk_free=512 << 20),), events=(saved,))
    assert (full.culprit, full.patch) == ("disk of node-a", {"checkpoint.keep": 1})
    filling = tuple(sample(at, disk_free=(100 << 30) - round(at * (50 << 20))) for at in range(0, 600, 60))
    assert "full in" in only("F068", samples=filling).verdict


def test_hot_gpus_and_memory_errors_are_reported() -> None:
    hot = tuple(sample(gpus=[gpu(temperature=91, sm_clock=1.2e9, throttle=["hw_thermal"])]) for _ in range(5))
    assert only("F069", samples=hot).culprit == "GPU 3 of node-a"
    broken = tuple(sample(at, gpus=[gpu(ecc_uncorrected=errors)]) for at, errors in enumerate((1, 1, 4)))
    found = only("F070", samples=broken)
    assert (found.severity, found.evidence["new"]) == ("fault", 3)


def test_swapping_is_reported_and_old_swap_is_not() -> None:
    swaps = tuple(sample(ram_used=61 << 30, swap_used=used << 30) for used in (0, 1, 3))
    assert only("F071", samples=swaps).patch == {"checkpoint.memory": 0}
    old = tuple(sample(swap_used=3 << 30) for _ in range(3))
    assert health_findings(evidence(samples=old)) == []


def test_unusable_samples_are_counted() -> None:
    bad = [event("bad_sample", sample=n, reason="the image is damaged") for n in range(12)]
    found = only("F072", events=bad)
    assert "12 of 1280 samples" in found.verdict
    assert health_findings(evidence(events=bad[:3])) == []


def test_differing_replicas_are_reported() -> None:
    data = {"message": "rank 2 differs from the others", "ranks": [2], "keys": ["norm.weight"], "since": 30}
    assert only("F073", events=(event("differ", at=40, **data),)).culprit == "rank 2"
    changed = only("F073", events=(event("differ", at=40, **data, type="MemoryChanged"),))
    assert changed.verdict.startswith("memory changed between updates 1 time")


def test_compression_that_hurts_is_reported() -> None:
    compressed = PLAN.model_copy(update={"comm": Comm.model_validate({"compression": "topk"})})
    rising = [3.0 - each / 50 for each in range(50)] + [2.0 + each / 50 for each in range(30)]
    lines = tuple(
        step(number + 1, loss=loss, **({"compression_error": 5.0} if number % 10 == 0 else {}))
        for number, loss in enumerate(rising)
    )
    found = only("F075", plan=compressed, recipe=recipe_with("plan.comm.compression=topk"), steps=lines)
    assert found.patch == {"plan.comm.compression": "bf16"}
    assert "compressed by topk is 5 of its size off" in found.verdict
    small = [each | {"compression_error": 1.8} for each in lines]  # normal with error feedback
    falling = [each | {"loss": 3.0 - each["step"] / 50} for each in lines]
    for quiet in (small, falling, lines[:50]):
        assert not health_findings(evidence(plan=compressed, steps=tuple(quiet)))


def test_routers_that_use_few_experts_are_reported() -> None:
    def lines(idle: float, entropy: float, number: int = 110) -> tuple[dict[str, Any], ...]:
        router = {"idle": idle, "entropy": entropy, "imbalance": 4.0}
        return tuple(step(each + 1, loss=3.0 - each / 100, router=router) for each in range(number))

    recipe = recipe_with("model.preset=tiny-moe")
    for collapsed in (lines(0.6, 0.7), lines(0.0, 0.3)):
        found = only("F076", recipe=recipe, steps=collapsed)
        assert found.patch == {"model.shape.experts.balance": 0.1}
    assert "60% of the experts got no token" in only("F076", recipe=recipe, steps=lines(0.6, 0.7)).verdict
    for quiet in (lines(0.1, 0.9), lines(0.6, 0.3, number=90)):
        assert not health_findings(evidence(recipe=recipe, steps=quiet))

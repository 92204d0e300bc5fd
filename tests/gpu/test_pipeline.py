"""Pipeline schedules on a GPU, with all stages on one rank, so that no activations are sent."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from trimaran.core import Mesh, Pipeline, Plan, TrainSection
from trimaran.data import StepBatch, text_batch
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import decoder_network, initialise
from trimaran.parallel import RankMesh, StageMap, build_mesh
from trimaran.train import StepClock, Stepper, build_stepper, join_process_group, read_rank_info
from trimaran.train.steppers import pipeline_stepper

pytestmark = pytest.mark.gpu

SPECS = {
    "dense": replace(PRESETS["tiny"], layers=4, tied=True),
    "mixed": replace(PRESETS["tiny-moe"], layers=4),
}
ACCUMULATION = 4
SEQ_LEN = 64


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankMesh]:
    join_process_group(read_rank_info({}))
    yield build_mesh(Mesh(), device_type=read_rank_info({}).device.type)
    dist.destroy_process_group()


def batch(device: torch.device) -> StepBatch:
    tokens = torch.randint(0, 320, (ACCUMULATION, 2, SEQ_LEN), generator=torch.Generator().manual_seed(7))
    labels = tokens.roll(-1, dims=-1)
    labels[0, 0, :20] = -100
    documents = torch.arange(SEQ_LEN).div(24, rounding_mode="floor").int().expand_as(tokens)
    return text_batch(0, tokens, labels, documents, tuple(range(2 * ACCUMULATION))).to(device)


def stepper(spec: ModelSpec, plan: Plan, layers: list[range], ranks: RankMesh) -> tuple[Stepper, StepClock]:
    device = read_rank_info({}).device
    with torch.device("meta"):
        networks = tuple(decoder_network(spec, each) for each in layers)
    for network in networks:
        network.module.to_empty(device=device)
        initialise(network.module, seed=0, spec=spec)
    clock = StepClock(device)
    return build_stepper(networks, TrainSection(), plan, ranks, clock), clock


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_schedule_on_one_gpu_trains_like_the_plain_stepper(
    schedule: str, kind: str, ranks: RankMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, device = SPECS[kind], read_rank_info({}).device
    fields = {"micro_batch": 2, "grad_accum": ACCUMULATION}
    plain, _ = stepper(spec, Plan.model_validate(fields), [range(4)], ranks)
    cuts = [range(4)] if schedule in ("gpipe", "1f1b") else [range(3), range(3, 4)]
    stages = StageMap(tuple(range(len(cuts))), (0,) * len(cuts), ranks.group("pp"))
    monkeypatch.setattr(pipeline_stepper, "map_stages", lambda plan, ranks: stages)
    split = {"mesh": Mesh(pp=2), "pipeline": Pipeline.model_validate({"schedule": schedule})}
    piped, clock = stepper(spec, Plan.model_validate(fields | split), cuts, ranks)
    for _ in range(3):
        clock.restart()
        ours, theirs = (each.step(batch(device)) for each in (piped, plain))
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-4)
        norms = [each.update(1e-3)[0].item() for each in (piped, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        details, phases = piped.details()(), clock.end_step()().phases
        assert 0 < details["bubble"]["measured"] < 1
        assert phases["forward"] > 0
        assert phases["backward"] > 0
    held_out = [each.evaluate(batch(device)).item() for each in (piped, plain)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)
    ids = batch(device).arrays["tokens"][0, 0, :9]
    assert torch.allclose(piped.next_token_logits(ids), plain.next_token_logits(ids), atol=1e-3)

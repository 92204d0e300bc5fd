"""`plan.comm.regather`: ranks save their part of a gathered input. It changes no bit, and saves the predicted bytes."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests import matrix, vlm_training
from tests.cases import quick_or_slow, slow
from tests.parity import train_trajectory
from tests.ranks import run_ranks
from trimaran.core import AdapterSection, Mesh, Plan
from trimaran.cost import STACKS, Job, layer_bytes, memory_inputs_of
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, ModelSpec, OutlineLayer, outline_of
from trimaran.nets import Network, attach_adapter, decoder_network, initialise, initialise_adapter, local_part
from trimaran.parallel import RankMesh, apply_plan, autocast, build_mesh, convert_linears
from trimaran.parallel.memory import regather
from trimaran.train import join_process_group, read_rank_info

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "tied": False}
DENSE, EXPERTS = (replace(PRESETS[name], **SMALL) for name in ("tiny", "tiny-moe"))
WIDE = replace(DENSE, layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512)
SEQ_LEN = 16
TP = Mesh(tp=2)
BF16 = Plan(mesh=TP, precision="bf16")


def with_regather(plan: Plan, wanted: bool = True) -> Plan:
    return plan.model_copy(update={"comm": plan.comm.model_copy(update={"regather": wanted})})


SAMPLES = 10  # that must be equal


class StorageRecorder(TorchDispatchMode):
    """Records the storages that operators create, to find those that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                storage = regather.local_tensor(each).untyped_storage()
                self.created[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive_bytes(self) -> int:
        """Return the bytes that are still alive when the threads of gloo have released theirs."""
        found = [self._alive_bytes()]
        while len(found) < SAMPLES or len(set(found[-SAMPLES:])) > 1:
            time.sleep(0.02)
            found.append(self._alive_bytes())
        return found[-1]

    def _alive_bytes(self) -> int:
        return sum(size for storage, size in self.created.items() if not storage.expired())


def loss_of(network: Network, tokens: Tensor) -> Tensor:
    logits, balance = network.forward({"tokens": tokens})
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    labels = network.context.shard(tokens).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum") + balance


def step(network: Network, plan: Plan, tokens: Tensor) -> list[Tensor]:
    """Return this rank's gradients of two micro-batches in flight, and their losses."""
    with autocast(plan, torch.device("cpu")):
        losses = [loss_of(network, part) for part in tokens.chunk(2)]
    for loss in losses:
        loss.backward()
    gradients = [each.grad for each in network.module.parameters() if each.requires_grad]
    assert all(each is not None for each in gradients)
    return [torch.stack(losses).detach(), *(local_part(each) for each in gradients if each is not None)]


def forward_bytes(network: Network, plan: Plan, tokens: Tensor) -> int:
    """Return how many bytes of the tensors that a forward creates are alive after it."""
    with autocast(plan, torch.device("cpu")), StorageRecorder() as recorder:
        loss = loss_of(network, tokens)
        alive = recorder.alive_bytes()
    del loss
    return alive


Build = Callable[[Plan, RankMesh], Network]


def compared(build: Build, plans: list[Plan], batch: int) -> list[tuple[int, int]]:
    """Return the bytes after forward without and with regather for each plan. All values must be equal."""
    join_process_group(read_rank_info(os.environ))
    found = []
    for plan in plans:
        ranks = build_mesh(plan.mesh, device_type="cpu")
        tokens = torch.randint(0, 320, (batch, SEQ_LEN), generator=torch.Generator().manual_seed(ranks.data_rank))
        networks = [build(each, ranks) for each in (with_regather(plan, False), with_regather(plan))]
        values = [step(network, plan, tokens) for network in networks]
        for ours, theirs in zip(*values, strict=True):
            assert torch.equal(ours, theirs), plan
        before, after = (forward_bytes(network, plan, tokens[: batch // 2]) for network in networks)
        found.append((before, after))
    dist.barrier()
    return found


def decoder(spec: ModelSpec, plan: Plan, ranks: RankMesh) -> Network:
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    apply_plan(network, plan, ranks)
    return network


def build_dense(plan: Plan, ranks: RankMesh) -> Network:
    return decoder(DENSE, plan, ranks)


def build_experts(plan: Plan, ranks: RankMesh) -> Network:
    return decoder(EXPERTS, plan, ranks)


def build_lora(plan: Plan, ranks: RankMesh) -> Network:
    network, section = decoder_network(DENSE), AdapterSection(rank=4)
    initialise(network.module, seed=0, spec=DENSE)
    attach_adapter(network, section)
    initialise_adapter(network.module, seed=0)
    apply_plan(network, plan, ranks)
    return network


def build_fp8(plan: Plan, ranks: RankMesh) -> Network:
    torch.backends.mkldnn.set_flags(_enabled=False)
    network = decoder_network(WIDE)
    initialise(network.module, seed=0, spec=WIDE)
    convert_linears(network)
    apply_plan(network, plan, ranks)
    return network


def predicted_drop(spec: ModelSpec, plan: Plan, batch: int) -> float:
    """Return how many bytes less the layers save by prediction, and half of the input of the head."""
    outline, positions = outline_of(spec), batch * SEQ_LEN
    job = Job(outline=outline, seq_len=SEQ_LEN, stack=STACKS["trimaran"])
    layer, found = outline.main.runs[0][0], []
    assert isinstance(layer, OutlineLayer)
    for each in (with_regather(plan, False), with_regather(plan)):
        inputs = memory_inputs_of(job, parse_cluster("2xcpu"), each)
        found.append(layer_bytes(layer, inputs.saved, inputs.element_bytes, inputs.tp, 1, inputs.cpu).none)
    head = positions * spec.hidden * (2 if plan.precision == "bf16" else 4) / 2
    return spec.layers * positions * (found[0] - found[1]) + head


def test_a_dense_model_saves_half_of_each_gathered_input_and_computes_the_same_bits() -> None:
    plans = [Plan(mesh=TP), BF16]
    for fp32, bf16 in run_ranks(2, compared, build_dense, plans, 4):
        assert fp32[0] - fp32[1] == predicted_drop(DENSE, plans[0], 2) == 5 * 2 * SEQ_LEN * DENSE.hidden * 4 / 2
        assert bf16[0] - bf16[1] == predicted_drop(DENSE, plans[1], 2)


def test_a_single_sequence_is_gathered_without_a_copy_and_saves_as_much() -> None:
    for ((before, after),) in run_ranks(2, compared, build_dense, [BF16], 2):
        assert before - after == predicted_drop(DENSE, BF16, 1)


def test_a_mixture_of_experts_also_drops_the_fp32_copy_that_its_router_reads() -> None:
    for ((before, after),) in run_ranks(2, compared, build_experts, [BF16], 4):
        copies = EXPERTS.layers * 2 * SEQ_LEN * EXPERTS.hidden * 4
        assert before - after == predicted_drop(EXPERTS, BF16, 2) + copies


CASES: dict[str, tuple[Build, Plan]] = {
    "lora": (build_lora, BF16),
    "fp8": (build_fp8, BF16),
    "every second block recomputed": (build_dense, Plan(mesh=TP, recompute=2)),
    "activations on the host": (build_dense, Plan(mesh=TP, offload="activations")),
    "zero-3": (build_dense, Plan(mesh=Mesh(tp=2, dp_shard=2), sharding="parameters", precision="bf16")),
    "cp": (build_dense, Plan(mesh=Mesh(tp=2, cp=2))),
    "experts on several ranks": (build_experts, Plan(mesh=Mesh(tp=2, dp_replicate=2, ep=2), precision="bf16")),
}


@pytest.mark.parametrize("name", quick_or_slow(CASES, lambda name: name == "activations on the host"))
def test_no_bit_changes_and_fewer_bytes_are_saved(name: str) -> None:
    build, plan = CASES[name]
    for ((before, after),) in run_ranks(plan.mesh.world_size, compared, build, [plan], 4):
        assert after < before


def recomputed() -> bool:
    join_process_group(read_rank_info(os.environ))
    ranks = build_mesh(TP, device_type="cpu")
    plan = with_regather(Plan(mesh=TP, recompute="full"))
    network = build_dense(plan, ranks)
    return any(isinstance(each, regather.RegatheringModule) for each in network.blocks[0].modules())


def test_blocks_that_are_recomputed_are_left_alone() -> None:
    assert run_ranks(2, recomputed) == [False, False]


def gathers() -> list[int]:
    """Return how many gathers have started after each of: forward, backward, a second backward."""
    join_process_group(read_rank_info(os.environ))
    ranks, counts, started = build_mesh(TP, device_type="cpu"), [], []
    gather = regather.gather_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        started.append(1)
        return gather(*args, **kwargs)

    regather.gather_single = counting
    network = build_dense(with_regather(Plan(mesh=TP)), ranks)
    loss = loss_of(network, torch.zeros(2, SEQ_LEN, dtype=torch.int64))
    counts.append(len(started))
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        counts.append(len(started))
    return counts


def test_an_input_is_gathered_once_in_each_backward_for_all_that_read_it() -> None:
    once = 2 * DENSE.layers + 1
    assert run_ranks(2, gathers) == [[0, once, 2 * once]] * 2


def compiled() -> tuple[int, int]:
    join_process_group(read_rank_info(os.environ))
    ranks = build_mesh(TP, device_type="cpu")
    tokens = torch.randint(0, 320, (4, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    found, values = [], []
    for wanted in (False, True):
        plan = with_regather(Plan(mesh=TP, compile=True, precision="bf16"), wanted)
        network, saved = decoder(replace(DENSE, layers=1), plan, ranks), {}

        def pack(tensor: Tensor, saved: dict[StorageWeakRef, int] = saved) -> Tensor:
            storage = regather.local_tensor(tensor).untyped_storage()
            saved[StorageWeakRef(storage)] = storage.nbytes()
            return tensor

        values.append(step(network, plan, tokens))
        with autocast(plan, torch.device("cpu")), saved_tensors_hooks(pack, lambda packed: packed):
            loss_of(network, tokens)
        found.append(sum(saved.values()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*values, strict=True))
    return found[0], found[1]


@pytest.mark.slow  # the compiler takes a minute
def test_a_compiled_block_gathers_again_and_computes_the_same_bits() -> None:
    for before, after in run_ranks(2, compiled, timeout=400):
        assert before - after >= predicted_drop(replace(DENSE, layers=1), BF16, 4)


@pytest.mark.parametrize(
    ("axes", "model", "settings"),
    [
        slow((("dp_shard", "tp"), "dense-tied", {"sharding": "parameters", "grad_accum": 2})),
        slow((("tp", "pp"), "dense-untied", {"schedule": "1f1b"})),
        slow((("tp", "pp"), "dense-tied", {"schedule": "zero-bubble"})),
    ],
    ids=str,
)
def test_a_run_ends_with_the_same_bits(
    tmp_path: Path, axes: tuple[str, ...], model: str, settings: dict[str, Any]
) -> None:
    matrix.write_documents(tmp_path / "uneven.jsonl")
    (tmp_path / "runs").mkdir()
    recipe, plan = matrix.recipe_for(model, tmp_path / "uneven.jsonl"), matrix.case_of(axes, model, **settings).plan
    ours, theirs = (train_trajectory(recipe, with_regather(plan, each), tmp_path / "runs") for each in (True, False))
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert all(torch.equal(ours.weights[name], each) for name, each in theirs.weights.items())


@pytest.mark.slow
def test_a_vision_language_model_trains_to_the_same_bits() -> None:
    plan = vlm_training.plan_of(mesh={"tp": 2}, towers={"vision": {"tp": 1}})
    ours, theirs = (
        vlm_training.train_all_ranks(vlm_training.SPEC, with_regather(plan, each)) for each in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == other.losses
        assert all((mine.weights[name] == each).all() for name, each in other.weights.items())

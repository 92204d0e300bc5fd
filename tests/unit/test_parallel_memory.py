"""Recompute and activation offload change memory use and no bit of the results."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.core import Plan
from trimaran.cost import STACKS, Job, layer_bytes, memory_inputs_of
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, ModelSpec, OutlineLayer, outline_of
from trimaran.nets import Network, decoder_network, hf_network, initialise
from trimaran.parallel import (
    ActivationOffload,
    SynchronousCopies,
    apply_joint_projections,
    apply_recompute,
    offload_blocks,
    split_weights,
)

MODES = ("elementwise", "selective", "full", 2)
DENSE = replace(PRESETS["tiny"], layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
MIXED = replace(PRESETS["tiny-moe"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
TOKENS = torch.randint(0, 320, (4, 16), generator=torch.Generator().manual_seed(7))
HF = LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def decoder(spec: ModelSpec) -> Network:
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    return network


def llama() -> Network:
    torch.manual_seed(0)
    return hf_network(LlamaForCausalLM(HF), None)


class DropoutBlock(nn.Module):
    """A block with dropout, which must be equal in the recompute. Called with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor, *, rate: float) -> Tensor:
        return x + F.dropout(self.inner(x), rate).sin()


class DropoutModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(320, 32), nn.ModuleList([DropoutBlock(), DropoutBlock()])

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rate=0.5)
        return x @ self.embed.weight.T, torch.zeros(())


def dropout_network() -> Network:
    torch.manual_seed(0)
    module = DropoutModel()
    return Network(module, tuple(module.layers), None)


NETWORKS: dict[str, Callable[[], Network]] = {
    "dense": lambda: decoder(replace(DENSE, layers=2)),
    "mixed": lambda: decoder(MIXED),
    "hf": llama,
    "dropout": dropout_network,
}


def loss_of(network: Network, tokens: Tensor) -> Tensor:
    logits, balance = network.forward({"tokens": tokens})
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()) + balance


def gradients(network: Network, *, precision: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the gradients of two micro-batches in flight at the same time; the last entry is the losses."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        losses = [loss_of(network, tokens) for tokens in TOKENS.chunk(2)]
    for loss in losses:
        loss.backward()
    found = [each.grad for each in network.module.parameters()]
    assert all(each is not None for each in found)
    return [*(each for each in found if each is not None), torch.stack(losses)]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


class Operators(TorchDispatchMode):
    """Counts every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "mode", "precision"),
    [*product(NETWORKS, MODES, [torch.float32]), ("dense", "elementwise", torch.bfloat16)],
)
def test_recompute_changes_no_bit_and_no_name(name: str, mode: Any, precision: torch.dtype) -> None:
    plain, network = NETWORKS[name](), NETWORKS[name]()
    apply_recompute(network, Plan(recompute=mode), None)
    assert [each for each, _ in network.module.named_parameters()] == [
        each for each, _ in plain.module.named_parameters()
    ]
    assert_same_bits(gradients(network, precision=precision), gradients(plain, precision=precision))


# Backward recomputes six of a block's seven matmuls: the output of the last one is not needed.
@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions"),
    [
        ("none", 0, 0),
        ("elementwise", 0, 0),
        ("selective", 4 * 3, 0),
        ("full", 4 * 6, 4),
        (2, 2 * 6, 2),
        (3, 2 * 6, 2),
        (1, 4 * 6, 4),
    ],
)
def test_each_mode_recomputes_the_expected_operators(mode: Any, matmuls: int, attentions: int) -> None:
    network = decoder(DENSE)
    apply_recompute(network, Plan(recompute=mode), None)
    with Operators() as seen:
        loss_of(network, TOKENS).backward()
    assert seen.calls["mm"] == 3 * (4 * 7 + 1) + matmuls
    assert seen.calls["_scaled_dot_product_flash_attention_for_cpu"] == 4 + attentions


def saved_and_peak(mode: Any) -> tuple[int, int]:
    """Return the bytes allocated between forward and backward, and the peak."""
    network, tracker = decoder(replace(DENSE, layers=2)), MemTracker()
    apply_recompute(network, Plan(recompute=mode), None)
    tracker.track_external(network.module)
    cpu = torch.device("cpu")
    with tracker:
        loss = loss_of(network, TOKENS)
        saved = tracker.get_tracker_snapshot()[cpu]["Total"]
        loss.backward()
    return saved, tracker.get_tracker_snapshot("peak")[cpu]["Total"]


def test_more_recompute_saves_less_memory() -> None:
    saved, peak = zip(*(saved_and_peak(mode) for mode in ("full", "selective", 2, "none")), strict=True)
    assert list(saved) == sorted(saved)
    assert len(set(saved)) == len(saved)
    assert saved[0] < 0.5 * saved[-1]
    assert peak[0] < peak[2] < peak[-1]
    assert peak[1] < peak[-1]
    elementwise, _ = saved_and_peak("elementwise")
    assert saved[1] < elementwise < saved[-1]


def test_a_copy_of_a_recomputed_network_has_its_own_weights() -> None:
    network, plain = decoder(DENSE), decoder(DENSE)
    apply_recompute(network, Plan(recompute="full"), None)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network.module.parameters():
            parameter.zero_()
    assert_same_bits(gradients(twin), gradients(plain))


class Graphs:
    """A compile backend that runs graphs unchanged, counts the matmuls of each, and the bytes that it returns."""

    def __init__(self) -> None:
        self.matmuls: list[int] = []
        self.returned_bytes: list[int] = []
        self.backend = aot_autograd(fw_compiler=self._compile, partition_fn=min_cut_rematerialization_partition)

    def _compile(self, graph: Any, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        matmuls = ("mm.default", "joint_matmul.default", "rotary_projection.default")
        self.matmuls.append(sum(any(each in name for each in matmuls) for name in names))
        returned = {node for node in graph.graph.output_node().args[0] if node is not None and node.op != "placeholder"}
        self.returned_bytes.append(sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in returned))
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    ("mode", "again"),
    [
        pytest.param("none", 0, marks=pytest.mark.slow),
        ("elementwise", 0),
        ("selective", 3),
        pytest.param("full", 6, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_saves_what_the_mode_says_and_the_cost_model_predicts(mode: Any, again: int) -> None:
    torch.compiler.reset()
    spec = replace(DENSE, layers=2)
    plan, network, plain, graphs = compiled_plan(mode), decoder(spec), decoder(spec), Graphs()
    apply_recompute(network, plan, None)
    for block in network.blocks:
        block.compile(backend=graphs.backend)
    assert_same_bits(gradients(network, precision=torch.bfloat16), gradients(plain, precision=torch.bfloat16))
    assert graphs.matmuls == [7, 14 + again], "equal blocks share one forward and one backward graph"
    job = Job(outline=outline_of(spec), seq_len=TOKENS.shape[1], stack=STACKS["trimaran"])
    layer, inputs = job.outline.main.runs[0][0], memory_inputs_of(job, parse_cluster("1xH100"), plan)
    assert isinstance(layer, OutlineLayer)
    # With the block's input, without its output.
    predicted = getattr(layer_bytes(layer, inputs.saved, 2, 1, 1, False), mode)
    if mode in ("elementwise", "selective"):
        assert graphs.returned_bytes[0] == TOKENS.numel() / 2 * predicted, "of one of two micro-batches"


def compiled_plan(mode: Any) -> Plan:
    return Plan(recompute=mode, compile=True, precision="bf16")


@pytest.mark.slow
def test_a_compiled_block_recomputes_joint_projections() -> None:
    torch.compiler.reset()
    plan, network, graphs = compiled_plan("full"), decoder(replace(DENSE, layers=2)), Graphs()
    split_weights([network], plan)
    apply_joint_projections([network], plan)
    apply_recompute(network, plan, None)
    for block in network.blocks:
        block.compile(backend=graphs.backend)
    gradients(network, precision=torch.bfloat16)
    assert graphs.matmuls == [4, 8 + 3], "the last one, which no backward needs, is not recomputed"


def test_dropout_is_equal_when_a_compiled_block_is_recomputed() -> None:
    torch.compiler.reset()
    plain, network = dropout_network(), dropout_network()
    apply_recompute(network, Plan(recompute="full", compile=True), None)
    for block in network.blocks:
        block.compile(backend=Graphs().backend)
    assert_same_bits(gradients(network), gradients(plain))


class RecordingCopies(SynchronousCopies):
    """Records every copy to and from the host."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        self.log.append(("to_host", source.data_ptr()))
        return super().to_host(source)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        self.log.append(("to_device", host.data_ptr()))
        return super().to_device(host)

    def count(self, event: str) -> int:
        return sum(each == event for each, _ in self.log)


def offloaded(network: Network, *, min_bytes: int = 512) -> RecordingCopies:
    record = RecordingCopies()
    offload_blocks(network, ActivationOffload(record, device="cpu", min_bytes=min_bytes))
    return record


@pytest.mark.parametrize(
    ("name", "mode", "precision"),
    [
        *product(NETWORKS, ["none", "full"], [torch.float32]),
        *product(["dense"], ["elementwise", "selective", 2], [torch.float32]),
        ("dense", "none", torch.bfloat16),
    ],
)
def test_offload_changes_no_bit_and_no_name(name: str, mode: Any, precision: torch.dtype) -> None:
    plain, network = NETWORKS[name](), NETWORKS[name]()
    apply_recompute(network, Plan(recompute=mode), None)
    record = offloaded(network)
    assert [each for each, _ in network.module.named_parameters()] == [
        each for each, _ in plain.module.named_parameters()
    ]
    assert_same_bits(gradients(network, precision=precision), gradients(plain, precision=precision))
    assert record.count("to_host") > record.count("to_device") > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_compiled_block_is_offloaded(mode: Any) -> None:
    torch.compiler.reset()
    spec = replace(DENSE, layers=2)
    network, plain, graphs = decoder(spec), decoder(spec), Graphs()
    apply_recompute(network, Plan(recompute=mode), None)
    record = offloaded(network)
    for block in network.blocks:
        block.compile(backend=graphs.backend)
    assert_same_bits(gradients(network), gradients(plain))
    assert len(graphs.matmuls) == 2
    assert record.count("to_device") > 0


def test_full_recompute_offloads_only_block_inputs() -> None:
    network = decoder(DENSE)
    apply_recompute(network, Plan(recompute="full"), None)
    record = offloaded(network)
    loss_of(network, TOKENS[:2]).backward()
    assert record.count("to_host") == 4
    assert record.count("to_device") == 3, "backward starts with the last block, which is still on the device"


def test_shared_tensors_are_offloaded_once_and_weights_never() -> None:
    num_copies = []
    for layers in (2, 3):
        network = decoder(replace(DENSE, layers=layers))
        weights = {each.untyped_storage().data_ptr() for each in network.module.parameters()}
        record = offloaded(network, min_bytes=0)
        loss_of(network, TOKENS[:2]).backward()
        assert not weights & {pointer for what, pointer in record.log if what == "to_host"}
        num_copies.append(record.count("to_host"))
    two, three = num_copies
    assert two - 2 * (three - two) == 2, "the rotary cosines and sines"


def test_a_block_is_prefetched_during_the_backward_of_the_next_block() -> None:
    network = decoder(DENSE)
    record = offloaded(network)
    for number, block in enumerate(network.blocks):
        block.register_forward_hook(lambda *_, number=number: record.log.append(("forward", number)))
        block.register_full_backward_hook(lambda *_, number=number: record.log.append(("backward", number)))  # pyrefly: ignore[bad-argument-type]
    loss_of(network, TOKENS[:2]).backward()

    def number_of(what: str, start: tuple[str, int], end: tuple[str, int]) -> int:
        return sum(each == what for each, _ in record.log[record.log.index(start) : record.log.index(end)])

    of_block_2 = number_of("to_host", ("forward", 1), ("forward", 2))
    rotation = 2
    assert number_of("to_device", ("forward", 3), ("backward", 3)) == of_block_2 + rotation
    assert number_of("to_device", ("backward", 1), ("backward", 0)) == 0, "block 0 is already on the device"


def test_only_the_last_block_is_on_the_device_after_forward() -> None:
    network = decoder(DENSE)
    offload = ActivationOffload(SynchronousCopies(), device="cpu", min_bytes=1024)
    offload_blocks(network, offload)
    loss = loss_of(network, TOKENS)
    calls, call = [], offload.latest
    while call is not None:
        calls.append(call)
        call = call.previous
    assert len(calls) == 4
    assert all(each() is not None for call in calls for each in call.storages)
    on_device = [any(each().on_device is not None for each in call.storages) for call in calls]
    assert on_device == [True, False, False, False]
    del loss
    assert all(each() is None for call in calls for each in call.storages), "storages live as long as the graph"


def test_nothing_is_offloaded_without_gradients() -> None:
    network = decoder(DENSE)
    record = offloaded(network)
    with torch.no_grad():
        loss_of(network, TOKENS)
    assert not record.log

"""A pipeline stage of a Hugging Face model: the same module, without what other stages hold. No name changes.

In place of a layer of another stage is one that returns its input, so that the model's own loop counts the layers as
before. The model runs from its tokens on in every stage: so it computes masks, positions and rotary tables as always.
What it computes for the stream before the first layer of the stage is replaced by the stream that enters the stage.

The layers are found by a call on the meta device, with autograd: the graph shows which weights each layer reads, and
that nothing but one stream passes from layer to layer.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.absent_modules import (
    STREAM_ARGUMENT,
    AbsentLayer,
    AbsentModule,
    LayerCall,
    StageStream,
    read_parameters,
    record_layer,
    tensors_in,
)
from trimaran.nets.hf.hf_attention import first_line, transformers, uses_eager_attention

if TYPE_CHECKING:
    from trimaran.nets.hf.hf import HfNetwork

NAME = "trimaran_layers"
TOKENS_SHAPE = (2, 8)
STREAM_NDIM = 3
SKIPPED_LAYERS = ("layerdrop", "decoder_layerdrop")  # settings that skip layers at random in training
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """The list `name` of layers in a model, and what the model reads around it.

    `before` and `after` are the modules whose own parameters are read before and after the layers. A tied embedding is
    in both; `tied` is the name of the module whose embedding it is, or empty. `num_outputs` is for each layer how many
    values it returns in a tuple, the first of which is the stream; 0 if it returns the stream itself.
    """

    name: str
    width: int
    before: frozenset[str]
    after: frozenset[str]
    tied: str
    num_outputs: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.num_outputs)


def find_layers(module: Any) -> LayerList:
    """Return the layers of a transformers model, unchanged. Raises UserError if it cannot be cut between them."""
    lists = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.ModuleList)]
    if not lists:
        raise no_pipeline(module, "has no list of layers")
    name, stack = max(lists, key=lambda pair: sum(each.numel() for each in pair[1].parameters()))
    if any(getattr(module.config.get_text_config(), each, 0) for each in SKIPPED_LAYERS):
        raise no_pipeline(module, f"skips layers of {name} at random in training")
    meta, calls, logits = _traced(module, name)
    if [call.layer for call in calls] != list(range(len(stack))):
        called = ", ".join(str(call.layer) for call in calls[:8])
        raise no_pipeline(module, f"calls the layers of {name} in another order than they are listed in ({called} ...)")
    # In the graph, each layer must read the stream of the one before and its own weights.
    owners, node = {id(each): parameter for parameter, each in meta.named_parameters()}, None
    for call in calls:
        where = f"{name}.{call.layer}"
        if node is not None and call.entering_node is not node:
            raise no_pipeline(module, f"changes the stream between {name}.{call.layer - 1} and {where}")
        assert call.leaving is not None
        if call.entering.ndim != STREAM_NDIM or call.leaving.shape != call.entering.shape:
            raise no_pipeline(module, f"has streams of another shape after {where}")
        if other := next((key for key, each in tensors_in(call.inputs) if each.requires_grad), ""):
            raise no_pipeline(module, f"passes {other}, which depends on weights, to {where} besides the stream")
        read = read_parameters(call.leaving.grad_fn, call.entering_node, owners)
        if foreign := sorted(each for each in read if not each.startswith(f"{where}.")):
            raise no_pipeline(module, f"reads {foreign[0]} in {where}: layers share weights or values")
        node = call.leaving.grad_fn
    first, last = calls[0], calls[-1]
    assert last.leaving is not None
    before = read_parameters(first.entering_node, None, owners)
    after = read_parameters(logits.grad_fn, last.leaving.grad_fn, owners)
    if inside := sorted(each for each in before | after if each.startswith(f"{name}.")):
        raise no_pipeline(module, f"reads {inside[0]} outside of its layer: it uses more than the last layer's result")
    names = {id(part): each for each, part in meta.named_modules()}
    embedding, head = names[id(meta.get_input_embeddings())], meta.get_output_embeddings()
    both = before & after
    if both - {f"{embedding}.weight"}:
        raise no_pipeline(module, f"reads {min(both)} before and after its layers")
    layers = {each for each, _ in meta.get_submodule(name).named_modules(prefix=name)}
    unused = {each for each in owners.values() if _owner(each) not in layers} - after - before
    for parameter in sorted(before | after | unused):
        if any(True for _ in meta.get_submodule(_owner(parameter)).children()):
            raise no_pipeline(module, f"holds {parameter} in a module with parts of its own")
    return LayerList(
        name=name,
        width=first.entering.shape[-1],
        before=frozenset(_owner(each) for each in before | unused),
        # The weight of a head that is tied to the embedding has the embedding's name.
        after=frozenset(_owner(each) for each in after - both)
        | ({names[id(head)]} if both and head is not None else set()),
        tied=embedding if both else "",
        num_outputs=tuple(call.num_outputs for call in calls),
    )


def _traced(module: nn.Module, name: str) -> tuple[Any, list[LayerCall], Tensor]:
    """Return a copy of the model on the meta device, and the calls of its layers and the logits of a call of it.

    Arguments and dtypes are tried, as models differ in what they accept: some experts run in bf16 only, some rotary
    tables in fp32 only.
    """
    reason = ""
    for dtype in (torch.float32, torch.bfloat16):
        meta = meta_copy(module, dtype).train()
        for arguments in trial_arguments(meta):
            calls: list[LayerCall] = []
            layers = enumerate(meta.get_submodule(name).children())
            handles = [hook for number, layer in layers for hook in record_layer(layer, number, calls)]
            try:
                logits = meta(use_cache=False, **arguments).logits
            except Exception as error:  # any error of the model's own code
                reason = reason or first_line(error)
                continue
            finally:
                for handle in handles:
                    handle.remove()
            return meta, calls, logits
    raise no_pipeline(module, f"does not run on the meta device ({reason})")


def trial_arguments(meta: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments to try on the meta device: a mask that is given is not built, which would read values."""
    batch, length = TOKENS_SHAPE
    tokens = torch.zeros(TOKENS_SHAPE, dtype=torch.long, device="meta")
    if getattr(meta, "_supports_attention_backend", False):
        transformers.AttentionInterface.register(NAME, _attend_to_all)
        meta.set_attn_implementation(NAME)
        yield {"input_ids": tokens, "position_ids": tokens}
    dtype = next(meta.parameters()).dtype if uses_eager_attention(meta) else torch.bool
    mask = torch.ones(batch, 1, length, length, dtype=dtype, device="meta")
    yield {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
    yield {"input_ids": tokens, "position_ids": tokens}
    yield {"input_ids": tokens, "attention_mask": mask}
    yield {"input_ids": tokens}


def _attend_to_all(
    part: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return a result that depends on all of its inputs, of the shape that attention returns."""
    out = value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return out + query.sum() + key.sum() + value.sum(), None


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def meta_copy(module: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy on the meta device, in `dtype`, whose parameters all need gradients."""

    def on_meta(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=kind)
        return nn.Parameter(empty, empty.is_floating_point()) if isinstance(tensor, nn.Parameter) else empty

    return deepcopy(module, {id(each): on_meta(each) for each in (*module.parameters(), *module.buffers())})


def no_pipeline(module: nn.Module, reason: str) -> UserError:
    return UserError("M069.cannot-split", where="plan.mesh.pp", kind=type(module).__name__, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfStage:
    """What a stage knows of the whole model, which is on the meta device: it says how parameters are sharded."""

    whole: nn.Module
    layers: LayerList
    part: range
    vocabulary: int

    @property
    def is_first(self) -> bool:
        return self.part.start == 0

    @property
    def is_last(self) -> bool:
        return self.part.stop == self.layers.count

    @property
    def tied_name(self) -> str:
        """The module with a copy of a tied embedding whose other copy is in another stage; empty if there is none."""
        return self.layers.tied if self.is_first != self.is_last else ""


def cut_stage(whole: "HfNetwork", layers: LayerList, part: range) -> "HfNetwork":
    """Return the stage of the model with the layers of `part`. `whole` is not changed."""
    module: Any = deepcopy(whole.module)
    stage = HfStage(whole=whole.module, layers=layers, part=part, vocabulary=whole.vocabulary)
    stream, stack = StageStream(), module.get_submodule(layers.name)
    for number, layer in enumerate(stack):
        if number not in part:
            plain = {key: each for key, each in vars(layer).items() if isinstance(each, PLAIN) and key[:1] != "_"}
            stack[number] = AbsentLayer(stream, layers.num_outputs[number], plain).train(layer.training)
    if not stage.is_first:
        stack[part.start - 1].enters = True
        _remove(module, layers.before - {layers.tied} if stage.is_last else layers.before, keep_width=True)
    if not stage.is_last:
        stack[part.stop].leaves = True
        _remove(module, layers.after, keep_width=False)
    module.register_forward_pre_hook(stream.take, with_kwargs=True)
    module.register_forward_hook(stream.give)
    present = [name for name, each in whole.module.named_modules() if any(each is block for block in whole.blocks)]
    # The blocks that are, or are in, layers of this stage.
    numbers = {name: name.removeprefix(f"{layers.name}.").partition(".")[0] for name in present}
    here = [name for name, number in numbers.items() if number.isdigit() and int(number) in part]
    blocks = tuple(module.get_submodule(name) for name in here)
    head = module.get_output_embeddings() if stage.is_last and whole.logits_head is not None else None
    return replace(whole, module=module, blocks=blocks, logits_head=head, stage=stage)


def pipeline_layers(whole: "HfNetwork") -> LayerList:
    """Return the layers to cut the model between. Raises UserError unless stages run on the meta device."""
    layers = find_layers(whole.module)
    count = layers.count
    parts = [range(1)] + [range(1, 2)] * (count > 2) + [range(count - 1, count)]
    for part in parts if count > 1 else ():
        stage, problem = None, ""
        for dtype in (torch.float32, torch.bfloat16):
            meta = replace(whole, module=meta_copy(whole.module, dtype).train(), blocks=())
            stage = cut_stage(meta, layers, part)
            problem = _problem(stage.module, layers, part, dtype)
            if not problem:
                break
        if problem:
            raise no_pipeline(whole.module, f"cannot run layers {part.start} to {part.stop - 1} of {layers.name} "
                              f"alone: {problem}")  # fmt: skip
    return layers


def _problem(module: Any, layers: LayerList, part: range, dtype: torch.dtype) -> str:
    """Return why a stage on the meta device does not run, or does not pass its stream on; empty if it does."""
    stream, problem = torch.zeros(*TOKENS_SHAPE, layers.width, dtype=dtype, device="meta", requires_grad=True), ""
    entering = {} if part.start == 0 else {STREAM_ARGUMENT: stream}
    for arguments in trial_arguments(module):
        try:
            out = module(use_cache=False, **arguments, **entering)
        except Exception as error:  # any error of the model's own code
            problem = problem or first_line(error)
            continue
        result = out if isinstance(out, Tensor) else out.logits
        if (part.stop < layers.count) != isinstance(out, Tensor):
            return "its stream does not leave it"
        if isinstance(out, Tensor) and out.shape != stream.shape:
            return "its stream has another shape"
        owners = {id(each): name for name, each in module.named_parameters()} | {id(stream): STREAM_ARGUMENT}
        read = read_parameters(result.grad_fn, None, owners)
        return "it does not read its stream" if entering.keys() - read else ""
    return problem


def _remove(module: nn.Module, names: frozenset[str], *, keep_width: bool) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        part = module.get_submodule(name)
        # What a module before the layers returns, if it differs in width from its input.
        width: Any = getattr(part, "embedding_dim", getattr(part, "out_features", 0)) if keep_width else 0
        absent = AbsentModule(width, is_embedding=hasattr(part, "embedding_dim"))
        for hook in part._forward_hooks.values() if keep_width else ():
            absent.register_forward_hook(hook)  # such as the cast to the plan's precision
        setattr(module.get_submodule(owner), leaf, absent.train(part.training))

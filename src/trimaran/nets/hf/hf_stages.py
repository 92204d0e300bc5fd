"""A pipeline stage of a Hugging Face model: the same module, without what other stages hold. No name changes.

In place of a layer of another stage is one that returns its input, so that the model's own loop counts the layers as
before. The model runs from its tokens on in every stage: so it computes masks, positions and rotary tables as always.
What it computes for the stream before the first layer of the stage is replaced by the stream that enters the stage.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimaran.nets.absent_modules import STREAM_ARGUMENT, AbsentLayer, AbsentModule, StageStream
from trimaran.nets.hf.hf_layers import TOKENS_SHAPE, LayerList, find_layers, meta_copy, no_pipeline, trial_arguments
from trimaran.nets.layer_trace import read_parameters

if TYPE_CHECKING:
    from trimaran.nets.hf.hf import HfNetwork

PLAIN = (bool, int, float, str, type(None))


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
            stack[number] = _absent_layer(stream, layers.num_outputs[number], layer)
    if not stage.is_first:
        stack[part.start - 1].enters = True
        _remove(module, layers.before - {layers.tied} if stage.is_last else layers.before, keep_width=True)
    if not stage.is_last:
        stack[part.stop].leaves = True
        _remove(module, layers.after, keep_width=False)
    module.register_forward_pre_hook(stream.take, with_kwargs=True)
    module.register_forward_hook(stream.give)
    present = [name for name, each in whole.module.named_modules() if any(each is block for block in whole.blocks)]
    blocks = tuple(module.get_submodule(name) for name in _inside(present, layers.name, part))
    head = module.get_output_embeddings() if stage.is_last and whole.logits_head is not None else None
    return replace(whole, module=module, blocks=blocks, logits_head=head, stage=stage)


def pipeline_layers(whole: "HfNetwork") -> LayerList:
    """Return the layers between which the model can be cut. Raises UserError if it cannot be cut."""
    layers = find_layers(whole.module)
    check_stages(whole, layers)
    return layers


def check_stages(whole: "HfNetwork", layers: LayerList) -> None:
    """Raise UserError unless a stage runs on the meta device, from the stream that enters to the one that leaves.

    Three kinds are tried: the first layer, one in the middle, and the last.
    """
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


def _problem(module: Any, layers: LayerList, part: range, dtype: torch.dtype) -> str:
    """Return why a stage on the meta device does not run, or does not pass its stream on; empty if it does."""
    stream, problem = torch.zeros(*TOKENS_SHAPE, layers.width, dtype=dtype, device="meta", requires_grad=True), ""
    entering = {} if part.start == 0 else {STREAM_ARGUMENT: stream}
    for arguments in trial_arguments(module):
        try:
            out = module(use_cache=False, **arguments, **entering)
        except Exception as error:  # any error of the model's own code
            problem = problem or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
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


def _inside(blocks: list[str], stack: str, part: range) -> list[str]:
    """Return the names of the blocks that are, or are in, layers of this stage."""
    numbers = {name: name.removeprefix(f"{stack}.").partition(".")[0] for name in blocks}
    return [name for name, number in numbers.items() if number.isdigit() and int(number) in part]


def _absent_layer(stream: StageStream, num_outputs: int, layer: nn.Module) -> AbsentLayer:
    plain = {key: each for key, each in vars(layer).items() if isinstance(each, PLAIN) and not key.startswith("_")}
    absent = AbsentLayer(stream, num_outputs, plain)
    return absent.train(layer.training)


def _remove(module: nn.Module, names: frozenset[str], *, keep_width: bool) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        part = module.get_submodule(name)
        absent = AbsentModule(_width(part) if keep_width else 0, is_embedding=hasattr(part, "embedding_dim"))
        for hook in part._forward_hooks.values() if keep_width else ():
            absent.register_forward_hook(hook)  # such as the cast to the plan's precision
        setattr(module.get_submodule(owner), leaf, absent.train(part.training))


def _width(part: Any) -> int:
    """Return the width of what a module before the layers returns, if that differs from the width of its input."""
    if hasattr(part, "embedding_dim"):
        return part.embedding_dim
    return part.out_features if hasattr(part, "out_features") else 0

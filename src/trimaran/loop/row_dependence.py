"""Finds out whether a loss is a sum over rows: whether the gradient of a row depends on the outputs of other rows.

A loss over the whole batch (contrastive, a ratio of sums, a norm) is another loss once the batch is split. The graph
between the model's outputs and the loss shows it: the gradient of one row is differentiated once more with respect to
all rows. Nothing is accumulated, no random number is drawn, and the model itself takes no part.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from trimaran.loop.loss_reduction import ignored_index

MAX_NODES = 20_000
MAX_ELEMENTS = 1 << 25  # of outputs and all that the loss makes of them: 128 MiB in fp32
MAX_OUTPUTS = 8
MAX_DEPTH = 12  # below the loss, to find a table of scores
LEAF_DEPTH = 4
MIN_ROWS = 4  # with fewer, a pair or triple of rows that belong together looks like the whole batch
TOLERANCE = 1e-6  # independent rows give exactly zero
VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "ToCopyBackward", "CloneBackward",
         "AliasBackward", "SliceBackward")  # fmt: skip
TURNS = ("PermuteBackward", "TransposeBackward", "TBackward", "UnsqueezeBackward", "SqueezeBackward")
LOSSES = ("NllLossBackward", "NllLoss2DBackward")
BATCH_NORMS = ("NativeBatchNormBackward", "CudnnBatchNormBackward", "MiopenBatchNormBackward")
STATISTICS = ("StdBackward", "VarBackward", "StdMeanBackward", "VarMeanBackward", *BATCH_NORMS)
FSDP_INPUTS = "RegisterPostBackwardFunction"  # passes the inputs of a sharded part on
TABLES = ("MmBackward", "AddmmBackward", "BmmBackward", "CdistBackward")
Cause = Literal["compared", "normalised", "dimension"]
"""Rows are compared or combined; normalised by statistics over rows; or independent along another dimension."""
Layout = tuple[Literal["dim", "block", "interleaved"], int]
"""Where the rows of an output are: along a dimension, or so many times along the first, row by row or copy by copy."""


def mark_outputs(output: Any, owner: str) -> None:
    """Mark the nodes of all tensors that a model returned. The marks live on the graph, and nothing is kept alive."""
    for each in _tensors_of(output):
        if each.grad_fn is not None:
            marks: Any = each.grad_fn.metadata
            marks.setdefault(owner, set()).add(each.output_nr)


def row_dependence(loss: Tensor, owner: str, num_rows: int) -> Cause | None:
    """Return why rows of the outputs of `owner` depend on each other in `loss`; None if they do not, or if unknown."""
    if num_rows < 2 or loss.grad_fn is None:
        return None
    if _has_table_of_scores(loss.grad_fn, owner, num_rows):
        return "compared"
    if num_rows < MIN_ROWS:
        return None
    between, outputs = _graph_of(loss.grad_fn, owner, num_rows)
    if not outputs or not _is_plain(between, outputs) or _is_cross_entropy(loss.grad_fn, between, outputs):
        return None
    try:
        cause = _cause(loss, outputs[:MAX_OUTPUTS], num_rows)
    except (RuntimeError, NotImplementedError):  # an operator without a second derivative, or no memory
        return None
    is_normalised = any(node.name().startswith(STATISTICS) for node in between)
    return "normalised" if cause == "compared" and is_normalised else cause


def _tensors_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors_of(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors_of(each)
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors_of(getattr(output, field.name))


def _shape(node: Any, number: int = 0) -> tuple[int, ...]:
    """Return the shape of a node's result in forward."""
    return tuple(node._input_metadata[number].shape)


def _layouts(shape: tuple[int, ...], num_rows: int) -> list[Layout]:
    """Return where the rows of the batch may be in a tensor."""
    found: list[Layout] = [("dim", dim) for dim, size in enumerate(shape) if size == num_rows]
    if shape and shape[0] > num_rows and shape[0] % num_rows == 0:
        found.append(("block", shape[0] // num_rows))
        found.append(("interleaved", shape[0] // num_rows))
    return found


def _as_rows(tensor: Tensor, layout: Layout, num_rows: int) -> Tensor:
    """Return a tensor with all elements of a row of the batch in its row."""
    kind, number = layout
    if kind == "dim":
        return tensor.movedim(number, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None]
    if kind == "block":
        return tensor.reshape(num_rows, -1)
    return tensor.reshape(number, num_rows, -1).movedim(1, 0).flatten(1)


def _cause(loss: Tensor, edges: list[GradientEdge], num_rows: int) -> Cause | None:
    """Differentiate twice. An output with several possible layouts must show a dependence in each of them."""
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is None or not gradient.requires_grad:
                continue  # the loss is linear in this output
            layouts = _layouts(tuple(gradient.shape), num_rows)
            if all(_is_dependent(gradient, layout, edges, num_rows) for layout in layouts):
                shape = _shape(edge.node, edge.output_nr)
                others = [dim for dim, size in enumerate(shape) if ("dim", dim) not in layouts and size > 1]
                if len(shape) > 2 and any(
                    not _is_dependent(gradient, ("dim", dim), [edge], shape[dim]) for dim in others if dim < 2
                ):
                    return "dimension"
                return "compared"
    return None


def _is_dependent(gradient: Tensor, layout: Layout, edges: list[GradientEdge], num_rows: int) -> bool:
    """Return whether the gradient of a row depends on other rows of any of the outputs, beyond a group of rows.

    Rows that belong together, such as pairs, are a group. Groups that divide the rows evenly are whole on their rank.
    """
    rows = _as_rows(gradient, layout, num_rows)
    weights = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype).mul_(2.4).cos_()
    groups = {size for size in range(2, num_rows) if num_rows % size == 0}
    largest = int(rows.detach().abs().sum(1).argmax())
    for number, row in enumerate((largest, num_rows // 2, num_rows // 2 - 1, 0, num_rows - 1)):
        seconds = torch.autograd.grad((rows[row] * weights).sum(), edges, retain_graph=True, allow_unused=True)
        dependent: set[int] = set()
        for each in seconds:
            if each is not None:  # an output with several layouts gives the fewest rows
                layouts = _layouts(tuple(each.shape), num_rows)
                dependent |= min((_nonzero(_as_rows(each, some, num_rows), row) for some in layouts), key=len)
        if not dependent and not number:
            return False
        groups = {size for size in groups if all(each // size == row // size for each in dependent)}
        if not groups:
            return True
    return False


def _nonzero(second: Tensor, row: int) -> set[int]:
    """Return the rows with a derivative other than `row`; none if some are not finite."""
    sizes = second.abs().amax(1).tolist()
    if not all(map(math.isfinite, sizes)):
        return set()
    return {each for each, size in enumerate(sizes) if each != row and size > TOLERANCE * max(sizes)}


def _graph_of(start: Any, owner: str, num_rows: int) -> tuple[list[Any], list[GradientEdge]]:
    """Return the nodes on paths from the loss to outputs with rows, and these outputs; none if the graph is large."""
    outputs: dict[Any, list[GradientEdge]] = {}
    leads: dict[Any, bool] = {}
    stack = [(start, False)]
    while stack:
        node, is_expanded = stack.pop()
        following = [each for each, _ in node.next_functions if each is not None]
        if is_expanded:
            leads[node] = any(each in outputs or leads[each] for each in following)
        elif node not in leads:
            leads[node] = False
            numbers = [each for each in node.metadata.get(owner, ()) if _layouts(_shape(node, each), num_rows)]
            if numbers:
                outputs[node] = [GradientEdge(node, each) for each in numbers]
            if len(leads) > MAX_NODES:
                return [], []
            stack.append((node, True))
            stack += [(each, False) for each in following if each not in leads]
    return [node for node, is_on_path in leads.items() if is_on_path], [
        edge for edges in outputs.values() for edge in edges
    ]


def _is_plain(nodes: list[Any], outputs: list[GradientEdge]) -> bool:
    """Return whether these nodes may be differentiated twice: small, no custom function, no layers that are trained.

    A custom function may hold a collective. BatchNorm with weights belongs to another model, as a discriminator.
    """
    size = sum(torch.Size(_shape(each.node, each.output_nr)).numel() for each in outputs)
    for node in nodes:
        name = node.name()
        if isinstance(node, BackwardCFunction):
            return False
        if name.startswith(BATCH_NORMS) and any(
            each is not None and each.name().endswith("AccumulateGrad") for each, _ in node.next_functions[1:]
        ):
            return False
        size += sum(torch.Size(each.shape).numel() for each in node._input_metadata)
    return size <= MAX_ELEMENTS


def _is_cross_entropy(loss: Any, between: list[Any], outputs: list[GradientEdge]) -> bool:
    """Return whether the loss is a cross-entropy of each row, or a sum of several: no derivative is needed."""
    ends, seen, stack = {each.node for each in outputs}, {loss}, [loss]
    has_loss = False
    while stack:
        node = stack.pop()
        name = node.name()
        following = [each for each, _ in node.next_functions if each is not None]
        if name.startswith(("AddBackward", "MulBackward", "DivBackward")):
            is_known = all(torch.Size(_shape(each)).numel() == 1 for each in (node, *following))
            is_known &= name.startswith("Add") or len(following) == 1
        elif name.startswith(LOSSES):
            is_known = has_loss = True
        elif name.startswith("LogSoftmaxBackward"):
            is_known = node._saved_dim % max(1, len(_shape(node))) > 0
        else:
            is_known = name.startswith(VIEWS)
        if not is_known:
            return False
        for each in following:
            if each not in ends and each not in seen:
                seen.add(each)
                stack.append(each)
    return has_loss and seen.issuperset(between)


def _has_table_of_scores(start: Any, owner: str, num_rows: int) -> bool:
    """Return whether a table of products or distances just below the loss compares rows with each other.

    Both factors are activations. One may be constant if the label of each row is its own number; within the model that
    is a frozen head. If two rows have the same label, the labels are classes, of which there happen to be as many as
    rows.
    """
    seen, level, labels = {start}, [start], _labels_of(start)
    for _ in range(MAX_DEPTH):
        level = [each for node in level for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(level)
        for node in level:
            if isinstance(node, BackwardCFunction):
                return False  # perhaps the rows of all ranks
            labels = labels if labels is not None else _labels_of(node)
            shape = _shape_of_table(node)
            is_table = len(shape) == 2 and shape[0] == shape[1] and shape[0] % num_rows == 0
            if is_table and node.name().startswith(TABLES):
                if labels is not None and len(set(labels)) < len(labels):
                    return False
                factors = [each for each, _ in node.next_functions[-2:]]
                are_activations = [_is_activation(each, shape[0]) for each in factors]
                is_in_model = any(owner in each.metadata for each in seen)
                is_own = labels == [*range(num_rows)] and num_rows >= MIN_ROWS and not is_in_model
                return all(are_activations) or (is_own and any(are_activations) and None in factors)
    return False


def _labels_of(node: Any) -> list[int] | None:
    """Return the labels of a cross-entropy, without ignored ones; None if this node is something else."""
    if not node.name().startswith("NllLossBackward"):
        return None
    labels = node._saved_target
    return labels[labels != ignored_index(node)].tolist()


def _shape_of_table(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's result, without the first dimension of 1 that `einsum` adds."""
    shape = _shape(node)
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def _is_activation(node: Any, size: int) -> bool:
    """Return whether a factor of a product is computed from this rank's rows: neither a weight nor gathered."""
    if node is None:
        return False
    shape, level = sorted(_shape_of_table(node)), [node]
    for _ in range(LEAF_DEPTH):
        for each in level:
            name = each.name()
            is_leaf = name.endswith("AccumulateGrad")
            is_custom = isinstance(each, BackwardCFunction) and not name.startswith(FSDP_INPUTS)
            if is_custom or (is_leaf and sorted(each.variable.shape) == shape):
                return False
        below = [following for each in level for following, _ in each.next_functions if following is not None]
        level = []
        for made in below:  # the node that makes what a chain of views shows
            while made.name().startswith((*VIEWS, *TURNS)) and made.next_functions[0][0] is not None:
                made = made.next_functions[0][0]
            level.append(made)
    return size in shape

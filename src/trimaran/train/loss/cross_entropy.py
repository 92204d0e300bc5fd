"""Cross-entropy, summed over tokens, also fused with the head of a language model."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trimaran.core import Plan
from trimaran.nets import Decoder, LoraLinear, Network, is_dtensor
from trimaran.parallel import RankMesh, own_dtype

IGNORED = -100


def summed_loss(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy summed over the labels that are not `IGNORED`, in fp32."""
    if is_dtensor(logits):
        from trimaran.parallel import vocab_parallel_token_losses  # noqa: PLC0415  only tp shards the vocabulary

        return vocab_parallel_token_losses(logits, labels, ignored=IGNORED, smoothing=smoothing).sum()
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum",
                           label_smoothing=smoothing)  # fmt: skip


def token_losses(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each label, flat, in fp32; 0 where the label is `IGNORED`."""
    if is_dtensor(logits):
        from trimaran.parallel import vocab_parallel_token_losses  # noqa: PLC0415  as above

        return vocab_parallel_token_losses(logits, labels, ignored=IGNORED, smoothing=smoothing)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none",
                           label_smoothing=smoothing)  # fmt: skip


def row_losses(logits: Tensor, labels: Tensor, *, grad_scale: float | None, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each row of `logits` [N, V], in fp32 or wider; 0 where the label is `IGNORED`.

    The logits are overwritten with their gradient times `grad_scale`. With `grad_scale` None they are not changed.
    """
    if logits.is_cuda and not smoothing:  # our kernel does not smooth
        from trimaran.train.loss.kernels import cross_entropy  # noqa: PLC0415  only CUDA builds have Triton

        return cross_entropy.row_losses(logits, labels, ignored=IGNORED, grad_scale=grad_scale)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORED
    tokens = torch.where(valid, labels, 0).unsqueeze(1)
    of_label = wide.gather(1, tokens)
    if smoothing:
        of_label = (1 - smoothing) * of_label + smoothing * wide.mean(1, keepdim=True)
    if grad_scale is None:
        return torch.where(valid, (wide.logsumexp(1, keepdim=True) - of_label).squeeze(1), 0.0)
    largest = wide.amax(1, keepdim=True)
    gradient = torch.softmax(wide, 1, out=wide)  # in place: an exponential of each logit is slow, so it is the only one
    log_sum = largest - gradient.amax(1, keepdim=True).log()  # exact, as the largest probability is at least 1 / V
    gradient.scatter_add_(1, tokens, gradient.new_full((1, 1), smoothing - 1.0).expand_as(tokens))
    if smoothing:
        gradient.sub_(smoothing / gradient.shape[1])
    if grad_scale != 1:
        gradient.mul_(grad_scale)
    if not bool(valid.all()):
        gradient.masked_fill_(~valid.unsqueeze(1), 0.0)
    if gradient is not logits:
        logits.copy_(gradient)
    return torch.where(valid, (log_sum - of_label).squeeze(1), 0.0)


def scale_to_dtype(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times the one-element tensor `factor`, in `dtype`; in place if the tensor already has it."""
    if tensor.is_cuda:
        from trimaran.train.loss.kernels import cross_entropy  # noqa: PLC0415

        return cross_entropy.scale_to_dtype(tensor, factor, dtype)
    return tensor.mul_(factor) if tensor.dtype == dtype else (tensor * factor).to(dtype)


log = logging.getLogger(__name__)

CHUNK_LOGITS_BYTES = 256 * 2**20  # logits in memory at a time, with a chunked loss
MIN_CHUNK_ROWS, CHUNK_ROW_MULTIPLE = 1024, 128  # fewer rows would not fill a GPU
FP16_GRAD_SCALE = 2.0**10  # keeps fp16 gradients of logits above 6e-8, the smallest fp16 number


class LossHead:
    """A head that can return losses instead of logits. It replaces the module's `forward`; parameter names stay."""

    def __init__(self, head: nn.Linear, *, chunked: bool) -> None:
        assert head.bias is None, "the fused loss does not compute the gradient of a bias"
        self._head, self._chunked, self._original_forward = head, chunked, head.forward
        self._labels: Tensor | None = None
        self._smoothing = 0.0
        head.forward = self._forward

    @contextmanager
    def computing_losses(self, labels: Tensor, *, smoothing: float = 0.0) -> Iterator[None]:
        """In this context the head returns [1 + number of labels]: the sum, with gradients, and each label's loss.

        One tensor holds both, as a single one passes through any module around the head. Contexts nest.
        """
        before = self._labels, self._smoothing
        self._labels, self._smoothing = labels.flatten(), smoothing
        try:
            yield
        finally:
            self._labels, self._smoothing = before

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._original_forward(hidden)
        weight = self._head.weight
        assert not is_dtensor(weight), "a head sharded by tp returns logits"
        kind, dtype = hidden.device.type, own_dtype(self._head)
        if dtype is None:
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        hidden = hidden.flatten(0, -2).to(dtype)
        rows = chunk_rows(weight.shape[0], hidden.element_size()) if self._chunked else max(1, len(hidden))
        return torch.cat(head_losses(hidden, weight, self._labels, rows=rows, smoothing=self._smoothing))


def build_loss_head(network: Network, plan: Plan) -> LossHead | None:
    """Return the network's head fused with the loss, if the plan asks for that; None if it returns logits."""
    if plan.loss == "logits" or plan.mesh.tp > 1:
        return None
    head = network.head
    is_matmul = not isinstance(head, LoraLinear) and network.has_bare_head
    if not isinstance(head, nn.Linear) or head.bias is not None or not is_matmul:
        log.warning("plan.loss is %s, but the head of this model is not a plain matmul: using full logits", plan.loss)
        return None
    return LossHead(head, chunked=plan.loss == "chunked")


def chunk_rows(vocab: int, element_size: int) -> int:
    """Return how many rows of logits a chunked loss computes at a time."""
    return max(MIN_CHUNK_ROWS, CHUNK_LOGITS_BYTES // (vocab * element_size) // CHUNK_ROW_MULTIPLE * CHUNK_ROW_MULTIPLE)


def head_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, rows: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy [1] of `hidden` [N, H] times `weight` [V, H], and that of each row [N], in fp32.

    Matmuls are in the dtype of `hidden`. At most `rows` rows of logits exist at a time. Gradients flow through the sum.
    """
    assert len(labels) == len(hidden), "each row has a label"
    return _HeadLoss.apply(hidden, weight, LabelRows(labels, rows, smoothing), torch.is_grad_enabled())


class LabelRows(NamedTuple):
    """The labels, how many rows of logits exist at a time, and the label smoothing."""

    labels: Tensor
    rows: int
    smoothing: float


class _HeadLoss(torch.autograd.Function):
    """See `head_losses`. `grad_enabled` is an argument because forward of an autograd function always runs no_grad."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: LabelRows, grad_enabled: bool) -> tuple[Any, ...]:
        needs = tuple(grad_enabled and each for each in ctx.needs_input_grad[:2])
        ctx.needs, ctx.dtypes = needs, (hidden.dtype, weight.dtype)
        ctx.grad_scale = FP16_GRAD_SCALE if hidden.dtype == torch.float16 else 1.0
        with torch.autocast(hidden.device.type, enabled=False):
            losses, *gradients = _losses_and_gradients(hidden, weight.to(hidden.dtype), labels, needs, ctx.grad_scale)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.mark_non_differentiable(losses)
        return losses.sum().reshape(1), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        factor, saved = gradients[0] / ctx.grad_scale, iter(ctx.saved_tensors)
        pairs = zip(ctx.needs, ctx.dtypes, strict=True)
        scaled = (scale_to_dtype(next(saved), factor, dtype) if needed else None for needed, dtype in pairs)
        return *scaled, None, None


def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, labels: LabelRows, needs: tuple[bool, ...], grad_scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each row, and `grad_scale` times those gradients of their sum that are needed."""
    rows, scale = labels.rows, grad_scale if any(needs) else None
    # 16 bits do not hold a sum over chunks, nor a sum of scaled fp16 gradients.
    in_fp32 = rows < len(hidden) or hidden.dtype == torch.float16
    hidden_grad, weight_grad = torch.empty_like(hidden) if needs[0] else None, None
    buffer, losses = hidden.new_empty(min(rows, len(hidden)), len(weight)), []
    for start in range(0, max(1, len(hidden)), rows):
        chunk = hidden[start : start + rows]
        logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
        own = labels.labels[start : start + rows]
        losses.append(row_losses(logits, own, grad_scale=scale, smoothing=labels.smoothing))
        if hidden_grad is not None:  # `logits` now holds their gradient
            torch.mm(logits, weight, out=hidden_grad[start : start + rows])
        if needs[1]:
            weight_grad = _accumulate_matmul(weight_grad, logits.t(), chunk) if in_fp32 else torch.mm(logits.t(), chunk)
    return torch.cat(losses), hidden_grad, weight_grad


def _accumulate_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return `total` plus the matmul of `left` and `right`, in place, in fp32 or wider."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:  # only CUDA matmuls may have a wider dtype than their inputs
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    left, right = left.to(dtype), right.to(dtype)
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


def compute_later_loss(network: Network, head: LossHead | None) -> None:
    """Let the decoder compute the loss of later tokens as that of the next one: from logits, or in the fused `head`."""
    decoder = network.module
    if not isinstance(decoder, Decoder) or not decoder.prediction_layers:
        return

    def from_logits(hidden: Tensor, labels: Tensor) -> Tensor:
        assert decoder.lm_head is not None, "prediction layers are in the last stage, with the head"
        return summed_loss(decoder.ended(decoder.lm_head(hidden)), labels)

    def in_head(hidden: Tensor, labels: Tensor) -> Tensor:
        assert decoder.lm_head is not None
        assert head is not None
        with head.computing_losses(labels):
            return decoder.lm_head(hidden)[0]

    decoder.loss_of_later = from_logits if head is None else in_head


def later_loss_names(networks: Sequence[Network]) -> tuple[str, ...]:
    """Return the names of these losses in the metrics: one for each prediction layer of the model."""
    module = networks[0].module if networks else None
    layers = module.spec.prediction_layers if isinstance(module, Decoder) else 0
    return tuple(f"mtp-{number}" for number in range(1, layers + 1))


def later_loss_sums(networks: Sequence[Network], ranks: RankMesh) -> Tensor:
    """Return [number of prediction layers, 2]: the summed loss and the count of this rank's labels since the last call.

    The ranks of a tp group have the same loss, so only the first returns it. So does only the last pipeline stage.
    """
    table = torch.zeros(len(later_loss_names(networks)), 2, dtype=torch.float64, device=ranks.device)
    for network in networks:
        decoder = network.module
        if isinstance(decoder, Decoder) and decoder.prediction_layers:
            taken = decoder.take_later_sums()
            if ranks.rank("tp") == 0:
                table += taken.to(ranks.device)
    return table

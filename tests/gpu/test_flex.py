"""Soft caps and sinks on a GPU: flex attention computes what stored scores do, eager and in compiled blocks."""

import pytest
import torch
from torch import Tensor

from trimaran.models import AttentionSpec, Block, ModelSpec
from trimaran.nets import (
    AttentionOptions,
    Decoder,
    Segments,
    attend,
    causal_window,
    has_flex_kernel,
    masked_attention,
    run_lengths,
)
from trimaran.nets.decoder import attention_context

pytestmark = pytest.mark.gpu
LENGTHS = (100, 300, 112)


def documents() -> Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize(("softcap", "has_sinks", "window"), [(20.0, False, None), (None, True, 96)])
def test_result_and_gradients_are_those_of_stored_scores(
    softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    ]
    sinks = torch.randn(4, device="cuda", requires_grad=True) if has_sinks else None
    assert has_flex_kernel(inputs[0], inputs[2])
    segments = Segments.of_documents(documents().cuda(), LENGTHS)
    options = AttentionOptions(softcap=softcap, sinks=sinks, window=window)
    found = attend(inputs[0], inputs[1], inputs[2], segments, options)
    positions = torch.arange(512, device="cuda")
    mask = causal_window(positions, positions, window) & segments.mask(causal=True)
    wide = [each.detach().float().requires_grad_() for each in inputs]
    expected = masked_attention(wide[0], wide[1], wide[2], mask, options)
    assert difference(found, expected) < 1e-2
    others = [] if sinks is None else [sinks]
    ours = torch.autograd.grad(found.float().square().sum(), [*inputs, *others])
    theirs = torch.autograd.grad(expected.square().sum(), [*wide, *others])
    assert all(difference(mine, other) < 1e-2 for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_compiled_blocks_have_the_gradients_of_stored_scores(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionSpec(softcap=0.0 if sinks else 20.0, sinks=sinks, windows=(200, 0))
    spec = ModelSpec(name="x", layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=512,
                     max_seq_len=1024, tied=True, block=Block(attention=attention))  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(spec).cuda()
    with torch.no_grad():
        for each in decoder.parameters():
            each.normal_(float(each.ndim == 1), 0.05)
    tokens, ids = torch.randint(0, 512, (2, 512), device="cuda"), documents().expand(2, -1).contiguous()

    def gradients() -> Tensor:
        decoder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits, _ = decoder(tokens=tokens, documents=ids.cuda(), lengths=run_lengths(ids))
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        return torch.cat([each.grad.flatten() for each in decoder.parameters() if each.grad is not None])

    with monkeypatch.context() as patched:
        patched.setattr(attention_context, "has_flex_kernel", lambda *_: False)
        expected = gradients()
    assert difference(gradients(), expected) < 2e-2
    for block in decoder.blocks:
        block.compile()
    assert difference(gradients(), expected) < 2e-2

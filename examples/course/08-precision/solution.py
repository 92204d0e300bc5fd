"""fp16 with a loss scale that finds itself: python examples/course/08-precision/solution.py"""

import torch
from lesson import STEP_VALUES, network

torch.set_num_threads(1)
STEPS, GROW_AFTER = 60, 20


def train(dtype, scale, is_dynamic):
    """Train fp32 master weights with gradients in `dtype`. Return the losses, the last scale, and the skipped steps."""
    model, inputs, targets = network(dtype)
    masters = [each.detach().float() for each in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-2, eps=1e-15)
    losses, skipped, good = [], 0, 0
    for _ in range(STEPS):
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters, strict=True):
                weight.copy_(master)
        model.zero_grad()
        loss = (model(inputs).float() - targets).square().sum() / STEP_VALUES
        (scale * loss).backward()
        for weight, master in zip(model.parameters(), masters, strict=True):
            master.grad = weight.grad.float() / scale  # in fp32, where the small values exist
        if not all(master.grad.isfinite().all() for master in masters):
            scale, good, skipped = scale / 2, 0, skipped + 1  # the weights stay as they are
            continue
        optimizer.step()
        losses.append(STEP_VALUES * loss.item() / targets.numel())  # the mean of this micro-batch
        good += 1
        if is_dynamic and good % GROW_AFTER == 0:
            scale *= 2
    return losses, scale, skipped


if __name__ == "__main__":
    cases = [("fp32, no scale", torch.float32, 1.0, False), ("fp16, no scale", torch.float16, 1.0, False),
             ("fp16, from 2^44", torch.float16, 2.0**44, True)]  # fmt: skip
    for label, *case in cases:
        losses, scale, skipped = train(*case)
        print(f"{label}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {skipped} steps skipped, last scale {scale:,.0f}")

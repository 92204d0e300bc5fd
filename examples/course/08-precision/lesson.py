"""What bf16, fp16 and fp8 lose, measured: python examples/course/08-precision/lesson.py"""

import torch
from torch import nn

from trimaran.parallel.fp8_linear import linear

torch.set_num_threads(1)
torch.manual_seed(0)
ROWS, WIDTH = 256, 16
STEP_VALUES = 2**26  # all values of a step, of which this micro-batch has ROWS x WIDTH


def formats():
    print("format  bytes  largest   smallest above 0  1 + this is the next number")
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps  # a subnormal number
        print(f"{name:13}  {dtype.itemsize}  {info.max:.3g}  {smallest:.3g}  {info.eps:.3g}")


def network(dtype):
    """Return two layers with the same weights for every dtype, their input and their targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    inputs = torch.randn(ROWS, WIDTH)
    return model, inputs.to(dtype), inputs.roll(1, dims=1).tanh()


def gradients(dtype, scale=1.0):
    """Return the gradient of every hidden value, in `dtype`. The loss is the mean over the step, times `scale`."""
    model, inputs, targets = network(dtype)
    hidden = model[1](model[0](inputs))
    hidden.retain_grad()
    loss = (model[2](hidden).float() - targets).square().sum() / STEP_VALUES
    (scale * loss).backward()
    return hidden.grad


def underflow():
    exact = gradients(torch.float32)
    print(f"\nthe median gradient of a hidden value is {exact.abs().median():.2g}")
    for label, dtype, scale in [("bf16", torch.bfloat16, 1), ("fp16", torch.float16, 1),
                                ("fp16, loss x 2^16", torch.float16, 2.0**16),
                                ("fp16, loss x 2^44", torch.float16, 2.0**44)]:  # fmt: skip
        found = gradients(dtype, scale)
        zeros, infinite = (found == 0).float().mean(), (~found.isfinite()).float().mean()
        error = (found.float() / scale - exact).norm() / exact.norm()
        shown = f"{error:.2%}" if error.isfinite() else "not finite"
        print(f"{label}: {zeros:.1%} are zero, {infinite:.1%} are not finite, relative error {shown}")


def small_updates():
    print("\na weight of 1 after 1,000 updates of 0.001")
    for label, dtype in [("bf16", torch.bfloat16), ("fp32", torch.float32)]:
        weight = torch.ones((), dtype=dtype)
        for _ in range(1000):
            weight += 0.001
        print(f"{label}: {weight.float():.3f}")


def saved_bytes(function, x, weight):
    """Return the output, and the bytes of what backward needs besides the weight."""
    sizes = []

    def save(tensor):
        if tensor.data_ptr() != weight.data_ptr() and tensor.numel() > 1:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        return function(x, weight), sum(sizes)


def fp8():
    """Multiply with the operator that Trimaran trains with; on a CPU its fp8 values are multiplied one by one."""
    x, weight = torch.randn(256, 256), 0.02 * torch.randn(256, 256)
    gradient = 1e-4 * torch.randn(256, 256)
    a, b = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = a @ b.T
    exact.backward(gradient.double())
    print("\nmatmul   output  input's gradient  weight's gradient  bytes kept for backward")
    for label, function in [("bf16", nn.functional.linear), ("fp8", linear)]:
        rows, matrix = (each.bfloat16().requires_grad_() for each in (x, weight))
        out, kept = saved_bytes(function, rows, matrix)
        out.backward(gradient.bfloat16())
        pairs = [(out, exact), (rows.grad, a.grad), (matrix.grad, b.grad)]
        errors = [((ours.double() - true).norm() / true.norm()).item() for ours, true in pairs]
        print(f"{label}  {errors[0]:.2%}  {errors[1]:.2%}  {errors[2]:.2%}  {kept:,}")
    unscaled = gradient.to(torch.float8_e4m3fn)
    scale = 448 / gradient.abs().max()
    scaled = (gradient * scale).to(torch.float8_e4m3fn)
    print(f"the gradient as e4m3: {(unscaled == 0).float().mean():.1%} are zero without a scale, "
          f"{(scaled == 0).float().mean():.1%} with the scale 448 / {gradient.abs().max():.2g}")  # fmt: skip


if __name__ == "__main__":
    formats()
    underflow()
    small_updates()
    torch.backends.mkldnn.enabled = False  # its fp8 matmul is slow on a CPU
    fp8()

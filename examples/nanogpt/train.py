"""The script of `train_plain.py` for any number of devices: `torchrun --nproc-per-node 2 train.py --max_iters=20`.

To see what changed: `diff train_plain.py train.py`.
"""

import math
import pathlib
import sys
import sysconfig
import time
from contextlib import nullcontext

import torch
from model import GPT, GPTConfig

import trimaran

out_dir = "out-nanogpt"
eval_interval = 10
eval_iters = 4
log_interval = 1
init_from = "scratch"  # or resume
gradient_accumulation_steps = 4
batch_size = 4
block_size = 32
n_layer = 2
n_head = 2
n_embd = 32
learning_rate = 3e-3
max_iters = 30
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
warmup_iters = 5
lr_decay_iters = 30
min_lr = 3e-4
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float32"  # or bfloat16, or float16 with a scaler
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

torch.manual_seed(1337)
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)

text = pathlib.Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
train_data, val_data = data[: -len(data) // 10], data[-len(data) // 10 :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


iter_num = 0
model = GPT(GPTConfig(block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd))
model.to(device)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay)
loop = trimaran.prepare(model, optimizer, scaler=scaler)
if init_from == "resume":
    iter_num = loop.resume(out_dir)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")  # fetch the very first batch
t0 = time.time()
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:  # on every rank: all draw the same batches
        losses = estimate_loss()
        if loop.is_main:
            print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
        if iter_num > 0:
            loop.save(out_dir, iter_num)
    if iter_num >= max_iters:
        break

    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(*loop.local_rows((X, Y)))
        X, Y = get_batch("train")  # prefetch the next batch while the device computes
        loop.backward(loss, num_samples=len(logits), reduction="mean")
    result = loop.step(clip_norm=grad_clip)

    t1 = time.time()
    if iter_num % log_interval == 0 and loop.is_main:
        lossf = result.loss.item()  # of the global batch
        print(f"iter {iter_num}: loss {lossf:.6f}, time {(t1 - t0) * 1000:.2f}ms")
    t0 = t1
    iter_num += 1

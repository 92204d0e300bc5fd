"""A user's own loop over NCCL: two ranks on this GPU train what one does, also by parts and with unused layers."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from trimaran.launch import SHARE_GPUS, shared_gpu_environment

pytestmark = pytest.mark.gpu

STEPS = 6
SCRIPT = """
import json, sys
import torch, trimaran
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        self.layers = nn.ModuleList(self.block() for _ in range(8))
        self.head, self.unused = nn.Linear(64, 32), nn.Linear(64, 64)

    def block(self):
        return nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))

    def encode(self, x):
        x = self.encoder(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x):
        return self.head(self.encode(x))

sharding, way, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
net = Net()
loop = trimaran.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), sharding=sharding)
call = torch.compile(net) if way == "compiled" else net
losses = []
for step in range(steps):
    draw = torch.Generator().manual_seed(step)
    batch = torch.randn(37, 64, generator=draw), torch.randint(32, (37,), generator=draw)
    if way == "gathered":
        x, _ = loop.local_rows(batch)
        rows = F.normalize(loop.gather(net(x)), dim=1)
        loop.backward(F.cross_entropy(rows @ rows.T * 5, torch.arange(37, device="cuda")), num_samples=37,
                      reduction="mean")
    else:
        for x, y in loop.micro_batches(batch, size=10 if way == "parts" else 37):
            logits = net.head(net.encode(x)) if way == "parts" else call(x)
            loop.backward(F.cross_entropy(logits, y), num_samples=len(y), reduction="mean")
    losses.append(float(loop.step(clip_norm=1.0).loss))
if loop.is_main:
    print(json.dumps(losses))
"""


def train(script: Path, ranks: int, sharding: str, way: str) -> list[float]:
    """Return the losses of a loop on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        shared = shared_gpu_environment({SHARE_GPUS: "1"}, rank)
        launcher = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port}  # fmt: skip
        command = [sys.executable, str(script), sharding, way, str(STEPS)]
        processes.append(
            subprocess.Popen(command, env=environment(**shared, **launcher), stdout=subprocess.PIPE, text=True)
        )
    outputs = [each.communicate(timeout=200)[0] for each in processes]
    assert [each.returncode for each in processes] == [0] * ranks
    return json.loads(outputs[0].splitlines()[-1])


@pytest.mark.parametrize("way", ["parts", "compiled", "gathered"])
def test_two_ranks_train_what_one_does(tmp_path: Path, way: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = train(script, 1, "none", way)
    for sharding in ("none", "parameters"):
        assert train(script, 2, sharding, way) == pytest.approx(alone, rel=2e-4), sharding

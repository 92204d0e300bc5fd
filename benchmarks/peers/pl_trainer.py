"""Lightning's Trainer with transformers' LlamaForCausalLM: bf16-mixed, the model compiled, the fused optimizer.

`barebones` switches off everything in Lightning that costs speed: logging, progress bar, checkpoints, sanity checks.
"""

from collections.abc import Callable
from typing import Any

import pytorch_lightning
import torch
import transformers
from benchmarks.peers.hf_trainer import Rows, build
from benchmarks.peers.timer import Timer
from benchmarks.peers.work import BETAS, CLIP, LR, WEIGHT_DECAY, Work
from torch import Tensor
from torch.utils.data import DataLoader

VERSION = f"pytorch-lightning {pytorch_lightning.__version__}, transformers {transformers.__version__}"


class Module(pytorch_lightning.LightningModule):
    def __init__(self, work: Work, timer: Timer) -> None:
        super().__init__()
        self.work, self.timer = work, timer
        self.model = build(work)
        if work.compile:
            self.model.compile()
        self.kept: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model(**batch).loss
        self.kept.append(loss.detach())
        return loss

    def on_train_batch_end(self, _outputs: Any, _batch: Any, index: int) -> None:
        if (index + 1) % self.work.grad_accum == 0:
            self.timer.step()

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip with torch: Lightning's own clipping refuses fused optimizers."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP, foreach=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    module = Module(work, timer)
    trainer = pytorch_lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=work.ranks,
        strategy="ddp" if work.ranks > 1 else "auto",
        max_steps=work.all_steps,
        accumulate_grad_batches=work.grad_accum,
        precision="32-true" if work.precision == "fp32" else "bf16-mixed",
        barebones=True,
    )
    trainer.fit(module, DataLoader(Rows(work), batch_size=work.micro_batch, pin_memory=on_gpu))
    return {"first_loss": module.kept[0].item(), "last_loss": module.kept[-1].item(), "version": VERSION}

"""torchtitan: its own Trainer, model, loss, optimizer and float8 converter, with our tokens in its own data loader.

It imports the library `datasets`, which is not used here: if it is missing, an empty stub replaces it. torchtitan does
not support CPUs: for the tests, `torch.cpu` gets the few device functions that it calls.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.peers.timer import Timer
from benchmarks.peers.titan_stubs import stub_datasets, use_cpu_without_gpu
from benchmarks.peers.work import BETAS, CLIP, LR, SEED, THETA, WEIGHT_DECAY, Work, draw_row
from torch.utils.data import IterableDataset

DATASETS_STUBBED = stub_datasets()

import torchtitan  # noqa: E402
import torchtitan.distributed.parallel_dims as titan_dims  # noqa: E402
import torchtitan.tools.utils as titan_tools  # noqa: E402

use_cpu_without_gpu(titan_tools, titan_dims)

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

NAME = "throughput"


class Rows(IterableDataset):
    """Our tokens, in the form of torchtitan's text dataset."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        index = 0
        while True:
            row = torch.from_numpy(draw_row(self.work, index))
            yield {"input": row[:-1]}, row[1:]
            index += 1


class Losses(MetricsProcessor):
    """The metrics processor, which also keeps the logged losses: those of the first and the last step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logged: list[float] = []

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        self.logged.append(global_avg_loss)
        super().log(step, global_avg_loss, *args, **kwargs)


class TimedTrainer(Trainer):
    """The Trainer, with a timer call after every step."""

    timer: Timer
    peak_bytes = reserved_bytes = 0

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.step == self.job_config.training.steps and torch.cuda.is_available():
            # Logging the last step, which is not timed, resets the peak.
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
        super().train_step(data_iterator)
        self.timer.step()


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    _set_rank_environment()
    _register(work)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(_job(work, folder))
        trainer.timer = timer
        weights = dict(trainer.model_parts[0].named_parameters())
        width = next(each.shape[0] for name, each in weights.items() if name.endswith("feed_forward.w1.weight"))
        assert width == work.model.ffn, f"its feed-forward layer is {width} wide"
        trainer.train()
        logged = trainer.metrics_processor.logged
        trainer.close()
    result = {"first_loss": logged[0], "last_loss": logged[-1], "version": f"torchtitan {torchtitan.__version__}"}
    if trainer.peak_bytes:
        result |= {"peak_bytes": trainer.peak_bytes, "reserved_bytes": trainer.reserved_bytes}
    return result | ({"note": "datasets is an empty stub"} if DATASETS_STUBBED else {})


def _set_rank_environment() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(environment)


def _register(work: Work) -> None:
    """Register the shape and the data with torchtitan under NAME; everything else is its Llama 3."""
    spec, shape = get_train_spec(), work.model
    spec.model_args = {
        NAME: TransformerModelArgs(
            dim=shape.hidden,
            n_layers=shape.layers,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            vocab_size=shape.vocab,
            # It computes the width of the feed-forward layer from these two, and rounds up.
            ffn_dim_multiplier=shape.ffn / (8 * shape.hidden // 3),
            multiple_of=256 if shape.ffn % 256 == 0 else 64,
            rope_theta=THETA,
            max_seq_len=work.seq_len,
        )
    }
    spec.build_tokenizer_fn = spec.build_validator_fn = spec.state_dict_adapter = None
    spec.build_metrics_processor_fn = Losses
    spec.build_dataloader_fn = lambda *, dp_world_size, dp_rank, job_config, **_: ParallelAwareDataloader(
        Rows(work), dp_rank, dp_world_size, batch_size=work.micro_batch, pin_memory=torch.cuda.is_available()
    )
    register_train_spec(NAME, spec)


def _job(work: Work, folder: str) -> JobConfig:
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name = job.model.flavor = NAME
    job.training.local_batch_size, job.training.seq_len = work.micro_batch, work.seq_len
    job.training.steps = job.metrics.log_freq = work.all_steps + 1
    job.training.max_norm = CLIP
    job.training.mixed_precision_param = "float32" if work.precision == "fp32" else "bfloat16"
    job.optimizer.lr, job.optimizer.weight_decay = LR, WEIGHT_DECAY
    job.optimizer.beta1, job.optimizer.beta2 = BETAS
    job.lr_scheduler.warmup_steps = 0
    job.debug.seed = SEED
    job.compile.enable = work.compile
    job.activation_checkpoint.mode = work.recompute
    job.activation_checkpoint.selective_ac_option = "op"
    if work.precision == "fp8":
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = list(work.options.get("filter", ["output"]))
        job.quantize.linear.float8.emulate = not torch.cuda.is_available()
    return job

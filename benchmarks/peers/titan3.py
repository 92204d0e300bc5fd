"""torchtitan 0.3: its own Trainer, model, loss, optimizer, CUDA graphs and float8 converter, with our tokens.

It captures forward and backward as a CUDA graph by default; the option `graphs=False` switches that off. Rows are full,
so attention is torch's causal one, which is its fastest here; the option `attention` names another of its backends.
Three names that matter only for several ranks are missing in torch 2.11 and are replaced by empty ones, as is the
library `datasets`, which is not used here. torchtitan does not support CPUs: for the tests, `torch.cpu` gets the few
device functions that it calls.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from benchmarks.peers.timer import Timer
from benchmarks.peers.titan_stubs import stub_datasets, use_cpu_without_gpu
from benchmarks.peers.work import BETAS, CLIP, LR, SEED, THETA, WEIGHT_DECAY, Work, draw_row
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.utils.data import IterableDataset

STUBBED = [
    name
    for module, name in ((torch_fsdp, "DataParallelMeshDims"), (_fsdp_common, "ShardPlacementResult"))
    if not hasattr(module, name)
]
for name in STUBBED:
    setattr(torch_fsdp if name == "DataParallelMeshDims" else _fsdp_common, name, type(name, (), {}))
if not hasattr(torch.distributed, "set_timeout"):
    STUBBED.append("set_timeout")
    torch.distributed.set_timeout = lambda *_: None
if stub_datasets():
    STUBBED.append("datasets")

import torchtitan.distributed.parallel_dims as titan_dims  # noqa: E402
import torchtitan.tools.utils as titan_tools  # noqa: E402

use_cpu_without_gpu(titan_tools, titan_dims)

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, DebugConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

VERSION = f"torchtitan {version('torchtitan')}"


class TitanRows(IterableDataset):
    """Our tokens, in the form of torchtitan's text dataset without positions: every row is one document."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        index = 0
        while True:
            row = torch.from_numpy(draw_row(self.work, index))
            yield {"input": row[:-1]}, row[1:]
            index += 1


class TitanLoader(ParallelAwareDataloader):
    work: Work

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(
            TitanRows(self.work),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            pin_memory=torch.cuda.is_available(),
        )


class NoTokenizer(BaseTokenizer):
    """Only the size of the vocabulary is asked for: rows are drawn as tokens, and nothing is encoded or decoded."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, _config: Any = None, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return TitanLoader.work.model.vocab


class TimedTitan(Trainer):
    """The Trainer, with a timer call after every step; it keeps the losses that it logs, of the first and last step."""

    timer: Timer
    peak_bytes = reserved_bytes = 0

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.step == self.config.training.steps and torch.cuda.is_available():
            # Logging the last step, which is not timed, resets the peak.
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
        super().train_step(data_iterator)
        self.timer.step()


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    _set_rank_environment()
    TitanLoader.work = work
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTitan(_config(work, folder))
        trainer.timer = timer
        logged: list[float] = []
        log = trainer.metrics_processor.log
        trainer.metrics_processor.log = lambda step, loss, *args, **more: (
            logged.append(loss), log(step, loss, *args, **more)
        )  # fmt: skip
        trainer.train()
        trainer.close()
    result: dict[str, Any] = {"first_loss": logged[0], "last_loss": logged[-1], "version": VERSION}
    if trainer.peak_bytes:
        result |= {"peak_bytes": trainer.peak_bytes, "reserved_bytes": trainer.reserved_bytes}
    return result | ({"note": f"empty stubs: {', '.join(STUBBED)}"} if STUBBED else {})


def _set_rank_environment() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _mixture(work: Work) -> Any:
    """Return the specification of this shape as torchtitan's Qwen3-MoE with an untied head, without load balancing."""
    shape = work.model
    spec = qwen3.model_registry("debugmodel_moe", attn_backend="flex")
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=shape.layers,
        dim=shape.hidden,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        moe_hidden_dim=shape.ffn,
        num_experts=shape.experts,
        top_k=shape.top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=work.seq_len, theta=THETA),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.load_balance_coeff = None
    spec.model = qwen3.Qwen3Model.Config(
        vocab_size=shape.vocab,
        dim=shape.hidden,
        norm=qwen3._qwen3_norm(shape.hidden),
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.hidden, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=shape.hidden, out_features=shape.vocab, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    spec.state_dict_adapter = None
    return spec


def _model(work: Work) -> Any:
    """Return the specification of this shape; everything else is torchtitan's Llama 3 with an untied head."""
    if work.model.experts:
        return _mixture(work)
    shape = work.model
    spec = llama3.model_registry("debugmodel", attn_backend=work.options.get("attention", "flex"))
    layers = llama3._build_llama3_layers(
        n_layers=shape.layers,
        dim=shape.hidden,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        hidden_dim=shape.ffn,
        rope=ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=work.seq_len, theta=THETA, scaling="none"),
        attn_backend=work.options.get("attention", "flex"),
    )
    if "attention" not in work.options:
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = llama3.Llama3Model.Config(
        dim=shape.hidden,
        vocab_size=shape.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.hidden, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=shape.hidden, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=shape.hidden,
            out_features=shape.vocab,
            param_init=llama3._output_linear_init(shape.hidden),
        ),
        layers=layers,
    )
    if work.precision == "fp8":
        from torchtitan.components.quantization import Float8LinearConverter  # noqa: PLC0415 - needs torchao

        converter = Float8LinearConverter.Config(
            model_compile_enabled=work.compile,
            filter_fqns=list(work.options.get("filter", ["lm_head"])),
            emulate=not torch.cuda.is_available(),
        )
        spec.model = converter.build().convert(spec.model)
    spec.state_dict_adapter = None
    return spec


def _config(work: Work, folder: str) -> Any:
    recompute = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[work.recompute]
    loss = CrossEntropyLoss.Config(global_vocab_size=work.model.vocab)
    return TimedTitan.Config(
        model_spec=_model(work),
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=TitanLoader.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if work.options.get("chunked") else loss,
        optimizer=default_adamw(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=work.micro_batch,
            global_batch_size=work.rows_per_step,
            seq_len=work.seq_len,
            steps=work.all_steps + 1,
            max_norm=CLIP,
            disable_cuda_graphs=not (torch.cuda.is_available() and work.options.get("graphs", True)),
            mixed_precision_param="float32" if work.precision == "fp32" else "bfloat16",
        ),
        metrics=MetricsProcessor.Config(log_freq=work.all_steps + 1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=recompute,
        compile=CompileConfig(enable=work.compile),
        debug=DebugConfig(seed=SEED, enable_structured_logging=False),
    )

"""One rank of an engine: rank 0 has the engine and sends the batch of each step, the others compute it."""

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.core import DEVICE_TRAITS, Mesh, UserError
from trimaran.models import rows_per_rank
from trimaran.nets import AdapterBank, Network, PagedCache, PagedExtension
from trimaran.parallel import DTYPES, RankMesh, build_mesh
from trimaran.runs import closed_listeners
from trimaran.serve.engine.engine_batch import EngineBatch
from trimaran.serve.engine.model_runner import ModelRunner, RunnerTraits, StepLogits, bytes_of_page, traits_of
from trimaran.serve.engine.open_engine import (
    OpenEngine,
    adapter_folders,
    cache_settings,
    new_engine,
    refuse_other_bases,
)
from trimaran.serve.engine.peer_watch import PeerWatch, watch_peers
from trimaran.serve.engine.sharded_weights import ServedModel, agreed, check_weights, open_part, refuse_unservable
from trimaran.serve.serving_layers import refuse_device
from trimaran.serve.settings import EngineConfig
from trimaran.serve.trained_model import has_adapter, section_of, usual_dtype

# Numbers in the first broadcast, enough for a decode step of dozens of sequences. A longer message needs a second one.
FIRST_NUMBERS = 8192
HEAD = 2  # kind and length
NO_NUMBERS = torch.empty(0, dtype=torch.int64)
log = logging.getLogger(__name__)
START_SECONDS = 300.0  # until all ranks have started and connected
STEP_TIMEOUT = timedelta(minutes=10)  # of a collective; a rank that dies ends it at once, see `peer_watch`
IDLE_SECONDS = 60.0  # after so long without a step rank 0 sends nothing, so that waiting does not time out


class MessageKind(IntEnum):
    """What a message is: the batch of a step, nothing (so that idle ranks do not time out), a command, the end."""

    STEP = 1
    NOTHING = 2
    COMMAND = 3
    STOP = 4


class StepChannel:
    """Sends on rank 0 and receives on all others, through the CPU backend of the default process group."""

    def __init__(self) -> None:
        self._first = torch.zeros(FIRST_NUMBERS, dtype=torch.int64)

    def send(self, kind: MessageKind, numbers: Tensor = NO_NUMBERS) -> None:
        """Send i64 numbers to every other rank."""
        room = FIRST_NUMBERS - HEAD
        self._first[0], self._first[1] = int(kind), len(numbers)
        here = numbers[:room]
        self._first[HEAD : HEAD + len(here)] = here
        dist.broadcast(self._first, 0)
        if len(numbers) > room:
            dist.broadcast(numbers[room:].contiguous(), 0)

    def receive(self) -> tuple[MessageKind, Tensor]:
        """Wait for the next message, and return it. The numbers are the receiver's own."""
        dist.broadcast(self._first, 0)
        kind, length = self._first[:HEAD].tolist()
        room = FIRST_NUMBERS - HEAD
        numbers = torch.empty(length, dtype=torch.int64)
        numbers[:room] = self._first[HEAD : HEAD + min(length, room)]
        if length > room:
            dist.broadcast(rest := torch.empty(length - room, dtype=torch.int64), 0)
            numbers[room:] = rest
        return MessageKind(kind), numbers


@dataclass(frozen=True, slots=True)
class StagedNetwork(Network):
    """A stage of a network, or a slice of its layers; all ranks compute each step. `dtype`: of the stream."""

    part: Network
    ranks: RankMesh
    dtype: torch.dtype

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        """Pass the stream from stage to stage. Return the logits [1, wanted, vocabulary] on rank 0, else none."""
        pipe, stage, num_stages = self.ranks.group("pp"), self.ranks.rank("pp"), self.ranks.degrees.pp
        is_first_tp, device = self.ranks.rank("tp") == 0, self.ranks.device
        num_tokens = inputs["tokens"].shape[1]
        num_logits = num_tokens if extension.kept is None else len(extension.kept)
        before: list[Tensor] = []
        if stage > 0:
            assert self.part.spec is not None, "pipeline stages are for our own networks"
            before.append(torch.empty(1, num_tokens, self.part.spec.hidden, dtype=self.dtype, device=device))
            dist.recv(before[0], group=pipe, group_src=stage - 1)
        out, logits = self.part.extend_pages(extension, inputs, *before), None
        if stage < num_stages - 1:
            assert out.dtype == self.dtype, "the next stage expects this dtype"
            dist.send(out.contiguous(), group=pipe, group_dst=stage + 1)
        else:
            logits = self._gathered(out)
        if num_stages > 1 and num_logits and is_first_tp:
            if logits is not None:
                dist.send(logits.contiguous(), group=pipe, group_dst=0)
            elif stage == 0:
                logits = torch.empty(1, num_logits, self.vocabulary, dtype=self.dtype, device=device)
                dist.recv(logits, group=pipe, group_src=num_stages - 1)
        is_source = stage == 0 and is_first_tp  # rank 0, which wants the logits
        return logits if logits is not None and is_source else torch.empty(1, 0, self.vocabulary, device=device)

    def _gathered(self, out: Tensor) -> Tensor | None:
        """Return the logits of all columns on the first tensor-parallel rank of the last stage, None on the others."""
        if not isinstance(out, DTensor):
            return out
        local, size, width = out.to_local(), self.ranks.degrees.tp, out.shape[-1]
        if not local.shape[1]:
            return local.new_empty(*local.shape[:-1], width)
        # The last ranks may have fewer columns: all send as many as the first.
        padded = F.pad(local, (0, rows_per_rank(width, size) - local.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(size)] if self.ranks.rank("tp") == 0 else None
        dist.gather(padded, parts, group=self.ranks.group("tp"), group_dst=0)
        return None if parts is None else torch.cat(parts, dim=-1)[..., :width]

    @property
    def head(self) -> nn.Module | None:
        return self.part.head

    @property
    def vocabulary(self) -> int:
        return self.part.vocabulary

    @property
    def max_seq_len(self) -> int:
        return self.part.max_seq_len

    @property
    def long_after(self) -> int:
        return self.part.long_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process's place: its rank of `tp` x `pp`, its device, and HOST:PORT where rank 0 lets the others find it."""

    rank: int
    tp: int
    pp: int
    address: str
    device: torch.device

    @property
    def mesh(self) -> Mesh:
        return Mesh(tp=self.tp, pp=self.pp)

    @property
    def world(self) -> int:
        return self.tp * self.pp


class RankedRunner:
    """Runs steps over all ranks: a `Runner` for the engine, on rank 0. One thread at a time may use it."""

    def __init__(self, rank: "OpenRank") -> None:
        self._rank, self._lock, self._closed = rank, threading.Lock(), threading.Event()
        runner = rank.runner
        self.num_pages, self.page_size = runner.num_pages, runner.page_size
        self.vocabulary, self.max_length = runner.vocabulary, runner.max_length
        self._steps = 0
        threading.Thread(target=self._keep_alive, name="idle-ranks", daemon=True).start()

    @property
    def traits(self) -> RunnerTraits:
        return self._rank.runner.traits

    def run(self, batch: EngineBatch) -> StepLogits:
        """See `Runner`."""
        with self._lock:
            self._steps += 1
            self._rank.channel.send(MessageKind.STEP, batch.to_tensor())
            return self._rank.runner.run(batch)

    def load(self, folder: Path, step: int | None) -> None:
        """Let every rank read other weights of the same model. The pages' keys and values are then of no use.

        If there are none to read, UserError is raised, and the old ones stay.
        """
        with self._lock:
            text = json.dumps({"folder": str(folder), "step": step}).encode()
            numbers = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))  # a byte each
            self._rank.channel.send(MessageKind.COMMAND, numbers)
            self._rank.load(folder, step)

    def close(self) -> None:
        """Tell the other ranks to end, and leave them."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._rank.channel.send(MessageKind.STOP)
                self._rank.leave()

    def _keep_alive(self) -> None:
        seen = -1
        while not self._closed.wait(IDLE_SECONDS):
            with self._lock:
                if seen == self._steps and not self._closed.is_set():
                    self._rank.channel.send(MessageKind.NOTHING)
                seen = self._steps


class OpenRank:
    """What a rank has open: its mesh, its part of the model, the channel from rank 0, and the watch over the others."""

    def __init__(self, place: RankPlace, model: ServedModel) -> None:
        self.model, self.channel = model, StepChannel()
        refuse_unservable(model.described, place.mesh)
        self.ranks, self.watch = join_ranks(place)
        try:
            network, bank = open_part(model, self.ranks)
            pages = model.num_pages
            if not isinstance(pages, int):
                pages = pages(self._linked(network), self.ranks.device)
            least = torch.tensor([pages])
            dist.all_reduce(least, dist.ReduceOp.MIN)
            self.runner = self._runner_of(network, bank, PagedCache(int(least), model.page_size))
        except UserError:  # all ranks raise, and none of them is lost before it has said why
            self.watch.close()
            raise

    def _runner_of(self, part: Network, bank: AdapterBank | None, cache: PagedCache) -> ModelRunner:
        """Return what computes this rank's part of each step."""
        network = self._linked(part)
        traits = traits_of(network)
        if self.ranks.degrees.pp > 1:  # rank 0 has no last layer
            traits = replace(traits, embeds=False)
        return ModelRunner(network, self.ranks.device, self.model.dtype, cache, traits, bank)

    def load(self, folder: Path, step: int | None) -> None:
        """Read other weights of the same model. The old ones are freed first: there may be no room for both.

        Raises UserError, and keeps the old ones, if a rank finds no weights there.
        """
        model = replace(self.model, folder=folder, step=step)
        agreed(lambda: check_weights(model))
        cache = self.runner.cache
        del self.runner
        if self.ranks.device_traits.has_own_memory:
            torch.cuda.empty_cache()
        self.runner = self._runner_of(*open_part(model, self.ranks), cache)

    def leave(self) -> None:
        """Leave the other ranks in order."""
        self.watch.close()
        dist.destroy_process_group()

    def _linked(self, part: Network) -> StagedNetwork:
        return StagedNetwork(part.module, part.blocks, part.spec, part, self.ranks, self.model.dtype)


def open_ranked_runner(place: RankPlace, model: ServedModel) -> RankedRunner:
    """Return the runner of all ranks, on rank 0, once every rank has its weights.

    Raises UserError if the model cannot be split so. If another rank ends without `close`, this process ends at once
    with RANK_LOST_EXIT.
    """
    assert place.rank == 0, "rank 0 has the engine"
    return RankedRunner(OpenRank(place, model))


def serve_rank(place: RankPlace, model: ServedModel) -> int:
    """Compute what rank 0 sends until it says stop; return 0 then. If rank 0 is lost this process ends non-zero."""
    assert place.rank > 0, "rank 0 has the engine"
    rank = OpenRank(place, model)
    while True:
        kind, numbers = rank.channel.receive()
        match kind:
            case MessageKind.STEP:
                rank.runner.run(EngineBatch.from_tensor(numbers))
            case MessageKind.COMMAND:
                command = json.loads(numbers.numpy().astype(np.uint8).tobytes())
                try:  # or keep the old ones, as all ranks do; rank 0 reports why
                    rank.load(Path(command["folder"]), command["step"])
                except UserError as error:
                    if not hasattr(rank, "runner"):
                        raise
                    log.warning("the weights stay as they are: %s", error.what)
            case MessageKind.STOP:
                rank.leave()
                return 0
            case MessageKind.NOTHING:
                continue


def join_ranks(place: RankPlace) -> tuple[RankMesh, PeerWatch]:
    """Return the mesh of all ranks, and the watch over them. Every rank must call it."""
    host, _, port = place.address.rpartition(":")
    traits, backend = DEVICE_TRAITS[place.device.type], DEVICE_TRAITS[place.device.type].group_backends
    if not traits.shares_cores:
        torch.cuda.set_device(place.device)
    store = dist.TCPStore(
        host, int(port), place.world, is_master=place.rank == 0, timeout=timedelta(seconds=START_SECONDS)
    )
    watch = watch_peers(store, rank=place.rank, world=place.world, host=host, timeout=START_SECONDS)
    with closed_listeners():
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=STEP_TIMEOUT)
        mesh = build_mesh(place.mesh, device_type=place.device.type)
    return mesh, watch


def open_ranked_engine(config: EngineConfig, address: str) -> OpenEngine:
    """Return the engine of rank 0. The other ranks must have been started, too."""
    runner = open_ranked_runner(*place_and_model(config, 0, address))
    return OpenEngine(
        new_engine(runner, config), lambda weights: runner.load(weights.path, weights.step), close=runner.close
    )


def place_and_model(config: EngineConfig, rank: int, address: str) -> tuple[RankPlace, ServedModel]:
    """Return where a rank is, and what it loads."""
    num_ranks, num_gpus = config.tp * config.pp, torch.cuda.device_count()
    if 0 < num_gpus < num_ranks:
        raise UserError("U014.ranks-need-many", where="--tp, --pp", num_ranks=num_ranks, num_gpus=num_gpus)
    if has_adapter(config.weights):
        raise UserError("U014.weights-with-adapter", where="--tp, --pp")
    section = section_of(config.weights)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    name = config.dtype
    if name == "auto":
        name = usual_dtype(config.weights, section) if DEVICE_TRAITS[device.type].prefers_16_bits else "fp32"
    dtype = DTYPES[name]  # each rank loads its own slices

    def num_pages(network: Network, on: torch.device) -> int:
        settings = cache_settings(network, on, config)
        pages = settings.max_bytes // bytes_of_page(network, on, dtype, settings.page_size)
        return min(pages, -(-(settings.max_tokens or pages) // settings.page_size))

    if config.quantise is not None:
        refuse_device(config.quantise, device)
    place = RankPlace(rank=rank, tp=config.tp, pp=config.pp, address=address, device=device)
    model = ServedModel(section=section, folder=config.weights.path, step=config.weights.step, dtype=dtype,
                        quantise=config.quantise, adapters=adapter_folders(config),
                        check_adapters=lambda: refuse_other_bases(config), page_size=config.sizes.page_size,
                        num_pages=num_pages)  # fmt: skip
    return place, model

"""One rank of a serving engine. Rank 0 has the engine and sends each step's batch; the others compute what it sends.

Start rank 0 with `open_ranked_runner`, and every other rank with `serve_rank`, each in a process of its own.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trimaran.core import Mesh, ModelSection, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.nets.paged_cache import PagedCache
from trimaran.parallel import RankMesh, build_mesh
from trimaran.runs.gloo_listeners import closed_listeners
from trimaran.serve.engine.engine_batch import EngineBatch
from trimaran.serve.engine.model_runner import ModelRunner, RunnerTraits, StepLogits
from trimaran.serve.engine.open_runner import traits_of
from trimaran.serve.engine.peer_watch import PeerWatch, watch_peers
from trimaran.serve.engine.sharded_weights import (
    OpenPart,
    PartSettings,
    WeightsFolder,
    agreed,
    check_weights,
    open_part,
    refuse_unservable,
)
from trimaran.serve.engine.staged_network import StagedNetwork, StageLinks
from trimaran.serve.engine.step_channel import MessageKind, StepChannel, command_numbers, read_command

log = logging.getLogger(__name__)

START_SECONDS = 300.0  # until all ranks have started and connected
STEP_TIMEOUT = timedelta(minutes=10)  # of a collective; a rank that dies ends it at once, see `peer_watch`
IDLE_SECONDS = 60.0  # after so long without a step rank 0 sends nothing, so that waiting does not time out


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What to serve: weights, how each rank holds them, and the pages of the cache.

    `folder` is a Hugging Face folder, or with a `step` the checkpoint of a run; `section` is the run's or the folder's
    model section. `num_pages` may be a function of the loaded part and its device, such as one that measures free
    memory; every rank calls it, so it may compute a step, and the smallest answer counts.
    """

    section: ModelSection
    folder: Path
    settings: PartSettings
    page_size: int
    num_pages: int | Callable[[Network, torch.device], int]
    step: int | None = None

    @property
    def weights(self) -> WeightsFolder:
        return WeightsFolder(section=self.section, folder=self.folder, step=self.step)


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
            self._rank.channel.send(MessageKind.COMMAND, command_numbers({"folder": str(folder), "step": step}))
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
        refuse_unservable(model.weights.described, place.mesh)
        self.ranks, self.watch = join_ranks(place)
        try:
            self.runner = self._open_runner()
        except UserError:  # all ranks raise, and none of them is lost before it has said why
            self.watch.close()
            raise

    def _open_runner(self) -> ModelRunner:
        model = self.model
        part = open_part(model.weights, self.ranks, model.settings)
        network = self._linked(part.network)
        pages = model.num_pages if isinstance(model.num_pages, int) else model.num_pages(network, self.ranks.device)
        least = torch.tensor([pages])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return self._runner_of(part, PagedCache(int(least), model.page_size))

    def _runner_of(self, part: OpenPart, cache: PagedCache) -> ModelRunner:
        """Return what computes this rank's part of each step."""
        network, dtype = self._linked(part.network), self.model.settings.dtype
        traits = traits_of(network)
        if self.ranks.degrees.pp > 1:  # rank 0 has no last layer
            traits = replace(traits, embeds=False)
        return ModelRunner(network, self.ranks.device, dtype, cache, traits, part.bank)

    def load(self, folder: Path, step: int | None) -> None:
        """Read other weights of the same model. The old ones are freed first: there may be no room for both.

        Raises UserError, and keeps the old ones, if a rank finds no weights there.
        """
        weights = replace(self.model.weights, folder=folder, step=step)
        agreed(lambda: check_weights(weights))
        cache = self.runner.cache
        del self.runner
        if self.ranks.device_traits.has_own_memory:
            torch.cuda.empty_cache()
        self.runner = self._runner_of(open_part(weights, self.ranks, self.model.settings), cache)

    def leave(self) -> None:
        """Leave the other ranks in order."""
        self.watch.close()
        dist.destroy_process_group()

    def _linked(self, part: Network) -> StagedNetwork:
        hidden = part.spec.hidden if part.spec is not None and self.ranks.degrees.pp > 1 else 0
        links = StageLinks(self.ranks, hidden, part.vocabulary, self.model.settings.dtype)
        return StagedNetwork(part.module, part.blocks, part.spec, part, links)


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
                command = read_command(numbers)
                _load_if_there(rank, Path(command["folder"]), command["step"])
            case MessageKind.STOP:
                rank.leave()
                return 0
            case MessageKind.NOTHING:
                continue


def _load_if_there(rank: OpenRank, folder: Path, step: int | None) -> None:
    """Load other weights, or keep the old ones, as all ranks do; rank 0 reports why. Raises if there are none left."""
    try:
        rank.load(folder, step)
    except UserError as error:
        if not hasattr(rank, "runner"):
            raise
        log.warning("the weights stay as they are: %s", error.what)


def join_ranks(place: RankPlace) -> tuple[RankMesh, PeerWatch]:
    """Return the mesh of all ranks, and the watch over them. Every rank must call it."""
    host, _, port = place.address.rpartition(":")
    traits = DEVICE_TRAITS[place.device.type]
    if not traits.shares_cores:
        torch.cuda.set_device(place.device)
    backend = traits.group_backends
    store = dist.TCPStore(
        host, int(port), place.world, is_master=place.rank == 0, timeout=timedelta(seconds=START_SECONDS)
    )
    watch = watch_peers(store, rank=place.rank, world=place.world, host=host, timeout=START_SECONDS)
    with closed_listeners():
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=STEP_TIMEOUT)
        mesh = build_mesh(place.mesh, device_type=place.device.type)
    return mesh, watch

"""The loader of an elastic replica: it goes on over synchronisations, unless rows are dealt out anew."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.loader import Loader
from trimaran.data.row_ledger import Deal, RowLedger
from trimaran.data.text.token_feed import TokenFeed
from trimaran.train.inputs.training_data import TrainingData


def dealt_data(data: TrainingData, ledger: RowLedger, replica: int, share: DataShare) -> TrainingData:
    """Return the training data of a replica: the rows that the ledger deals to it. Held-out data stay the same."""

    def training(quarantined: frozenset[int]) -> BatchFeed:
        feed = data.training(quarantined)
        assert isinstance(feed, TokenFeed), "elastic replicas train on text"
        return feed.with_share(ledger.dealt_share(replica, share))

    return replace(data, training=training)


class DealtLoader:
    """Opens the loader of a step, and keeps it open: batches that are loaded ahead stay right in a healthy run."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._loader: Loader | None = None
        self._deal: Deal | None = None

    @contextmanager
    def open(self, loader_from: Callable[[int], AbstractContextManager[Loader]], step: int) -> Iterator[Loader]:
        """Yield the loader of the batches from `step` on. Another block continues with it."""
        deal = self._ledger.deal
        is_next = self._loader is not None and self._loader.next_step == step
        if not is_next or self._deal is None or not self._ledger.continues(self._deal):
            self.close()
            self._loader, self._deal = loader_from(step).__enter__(), deal
        assert self._loader is not None
        yield self._loader

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._loader = None

"""Hashes the base of an adapter in the background, shared out over the ranks, while the weights are loaded."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimaran.checkpoint import AdapterFacts, TorchStore, whole_modules
from trimaran.checkpoint.convert.export_peft import save_adapter
from trimaran.checkpoint.saver import RANK_TIMEOUT_SECONDS
from trimaran.core import ModelSection, Recipe, UserError
from trimaran.models import BaseDigest, base_difference, file_digest, file_identity, initial_digest
from trimaran.models.weight_files import base_files, changed_base
from trimaran.nets import Network
from trimaran.parallel import all_gather_json, broadcast_json
from trimaran.train.checkpointing.tiers import Base
from trimaran.train.process.supervisor_link import SupervisorLink, supervisor_store

ERROR = "error: "
MAX_POLL_SECONDS = 0.25

Identities = Mapping[str, Sequence[int]]  # by the name of a file, what `file_identity` returns for it


class BaseHashing:
    """The digest of the base, as `BaseDigest.as_dict` gives it, once all ranks have hashed their part of it.

    Ranks that see the same file, by its identity, share its disk: one of them hashes it. Copies on several machines are
    hashed on each of them and must be equal. Every rank must create one.
    """

    def __init__(self, recipe: Recipe, link: SupervisorLink, cache: Path) -> None:
        section = recipe.model
        self._paths = {each.name: each for each in base_files(section)}
        self._identities = {name: file_identity(path) for name, path in self._paths.items()}
        self._initial = initial_digest(section, recipe.train.seed)
        rows = all_gather_json([self._identities, secrets.token_hex(8)])
        self._holders = file_holders([identities for identities, _ in rows])
        self._prefix, self._cache, self._rank = f"trimaran/base/{rows[0][1]}", cache, dist.get_rank()
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = TorchStore(supervisor_store(link) if link.store else shared.clone())
        self._known: dict[str, Any] | None = None
        self._is_compared = False
        mine = assigned_files(self._holders, rank=self._rank)
        threading.Thread(target=self._hash, args=(mine,), name="trimaran-base-digest", daemon=True).start()

    def known(self) -> dict[str, Any] | None:
        """Return the digest if all ranks are done, else None."""
        if self._known is not None:
            return self._known
        keys = {
            name: [self._key(name, assigned_rank(self._holders, name, group)) for group in groups]
            for name, groups in self._holders.items()
        }
        if self._store.has([each for of_copies in keys.values() for each in of_copies]):
            files: dict[str, str] = {}
            for name, of_copies in keys.items():
                for text in self._store.wait_get(of_copies, RANK_TIMEOUT_SECONDS):
                    if text.startswith(ERROR):
                        raise changed_base(self._paths[name], text.removeprefix(ERROR))
                    if files.setdefault(name, text) != text:
                        raise _different_copies(f"{name} has other contents on some")
            self._known = BaseDigest(files=files, initial=self._initial).as_dict()
        return self._known

    def wait(self, report_progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return the digest when all ranks are done. Raises UserError if a file cannot be read or copies differ."""
        deadline, pause = time.monotonic() + RANK_TIMEOUT_SECONDS, 0.005
        while (found := self.known()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the base is not hashed within {RANK_TIMEOUT_SECONDS:g} s")
            time.sleep(pause)
            pause = min(MAX_POLL_SECONDS, 1.5 * pause)
            report_progress()
        return found

    def wait_unchanged(self, report_progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return what `wait` does. Raises UserError if a file has changed between the start and the first call."""
        found = self.wait(report_progress)
        if not self._is_compared:
            digests = found["files"]
            for name, path in self._paths.items():
                try:
                    is_same = file_identity(path) == self._identities[name]
                    if not is_same and file_digest(path, self._cache) != digests[name]:
                        raise changed_base(path, "it changed while it was read")
                except OSError as error:
                    raise changed_base(path, f"it cannot be read: {error.strerror}") from None
            self._is_compared = True
        return found

    def _hash(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                text = file_digest(self._paths[name], self._cache)
            except UserError as error:
                text = f"{ERROR}{error.what}"
            except OSError as error:
                text = f"{ERROR}{name} cannot be read: {error.strerror}"
            self._store.set(self._key(name, self._rank), text)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{rank}/{name}"


@dataclass(frozen=True, slots=True)
class AdapterBase(Base):
    """The base of an adapter: its digest, and once the networks are known a function to reload it. See `Base`."""

    hashing: BaseHashing
    path: str
    read_again: Callable[[], None] = lambda: None
    is_apart = True

    def known(self) -> dict[str, Any]:
        found = self.hashing.known()
        return {"base": found} if found else {}

    def name(self) -> dict[str, Any]:
        return {"base": self.hashing.wait_unchanged()}

    def is_named_in(self, progress: Mapping[str, Any]) -> bool:
        return bool(broadcast_json(progress.get("base")))

    def refuse_other(self, progress: Mapping[str, Any], report_progress: Callable[[], None]) -> None:
        saved = broadcast_json(progress.get("base"))
        now = self.hashing.wait_unchanged(report_progress)
        if saved and (difference := base_difference(saved, now)):
            raise changed_base(f"model.path ({self.path})", difference)

    def reload(self) -> None:
        self.read_again()

    def model_writer(
        self, section: ModelSection, network: Network, report_progress: Callable[[], None]
    ) -> Callable[..., None]:
        """Write the adapter alone, as a PEFT folder."""

        def facts() -> AdapterFacts:
            modules = whole_modules(section, network)
            return AdapterFacts(section=section, base=self.hashing.wait(report_progress), modules=modules)

        return partial(save_adapter, read_facts=facts)

    def of_networks(self, reload: Callable[[], None]) -> "AdapterBase":
        return replace(self, read_again=reload)


Holders = Mapping[str, Sequence[Sequence[int]]]  # by the name of a file: for each of its copies, the ranks that see it


def file_holders(rows: Sequence[Identities]) -> Holders:
    """Return which ranks see the same copy of each file. Raises UserError if some ranks have other files."""
    for identities in rows:
        if different := sorted(identities.keys() ^ rows[0].keys()):
            raise _different_copies(f"{different[0]} is not on all")
    holders: dict[str, dict[tuple[int, ...], list[int]]] = {name: {} for name in rows[0]}
    for rank, identities in enumerate(rows):
        for name, identity in identities.items():
            holders[name].setdefault(tuple(identity), []).append(rank)
    by_size = sorted(holders, key=lambda name: (-rows[0][name][0], name))
    return {name: [*holders[name].values()] for name in by_size}


def assigned_rank(holders: Holders, name: str, group: Sequence[int]) -> int:
    """Return the rank that hashes a copy of a file. The largest files are dealt first, one to each rank in turn."""
    return group[[*holders].index(name) % len(group)]


def assigned_files(holders: Holders, *, rank: int) -> list[str]:
    return [
        name for name, groups in holders.items() if any(assigned_rank(holders, name, group) == rank for group in groups)
    ]


def _different_copies(what: str) -> UserError:
    return UserError("K049.machines-run-different", where="model.path", text=what)

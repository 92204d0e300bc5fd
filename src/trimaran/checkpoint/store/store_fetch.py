"""Gets checkpoints from the object store when a run resumes. Every rank makes the same calls together.

The first rank of each node talks to the store for its node. What was fetched is verified like every other file before
it is used.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from trimaran.checkpoint.durable import DISK, report_disk_errors, write_file
from trimaran.checkpoint.manifest import INDEX, MANIFEST, Manifest, parse_manifest
from trimaran.checkpoint.rank_layout import RankLayout, all_true
from trimaran.checkpoint.step_dirs import complete_steps, draft_path, step_path
from trimaran.checkpoint.store.object_store import StoreError, describe, stored_name, unusable_store
from trimaran.checkpoint.store.store_client import DamagedInStoreError, StoreClient
from trimaran.checkpoint.store.store_uploads import refuse_ordered, taken_over
from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import all_gather_json, broadcast_json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class StoreFetcher:
    """Lists and fetches the checkpoints of a run in its store. `owner` is this run, see `ObjectStore.claim`.

    `own_disk`: every node has its own files in its own `folder`.
    """

    def __init__(
        self, client: StoreClient, folder: Path, rank_layout: RankLayout, owner: dict[str, Any], *, own_disk: bool
    ) -> None:
        self._client, self._folder, self._rank_layout, self._owner = client, folder, rank_layout, owner
        self._own_disk = own_disk
        self._names: dict[int, str] | None = None
        self.failed = ""
        """Why the store was not asked for its checkpoints, though it should have been."""

    def close(self) -> None:
        self._client.close()

    def names(self) -> dict[int, str]:
        """Return the complete checkpoints in the store by step. They are asked for once.

        If the store cannot be used, there are none, if this run has checkpoints of its own. Otherwise UserError is
        raised: the run would silently start from step 0.
        """
        if self._names is None:
            answer = broadcast_json(self._ask() if self._rank_layout.rank == 0 else {})
            if fields := answer.get("user_error"):
                raise UserError(fields["code"], fields["what"], where=fields["where"], fix=fields["fix"])
            self.failed = answer["failed"]
            self._names = {int(step): name for step, name in answer["names"].items()}
        return self._names

    def _ask(self) -> dict[str, Any]:
        has_own = bool(complete_steps(self._folder))
        try:
            other = self._client.call("claim", owner=self._owner, take_over=not has_own)
            if other:
                return {"names": {}, "failed": taken_over(other)}
            refuse_ordered(self._client, self._folder)
            return {"names": self._client.call("steps"), "failed": ""}
        except UserError as error:
            return {"user_error": error.as_dict()}
        except StoreError as error:
            if not has_own:
                return {"user_error": unusable_store(self._client.url, str(error)).as_dict()}
            log.warning("the store %s cannot be used: %s", self._client.url, error)
            return {"names": {}, "failed": str(error)}

    def has(self, step: int, path: Path) -> bool:
        """Return whether the store has the checkpoint of `path`, as rank 0 has it there."""
        name, is_same = self.names().get(step), False
        if name and self._rank_layout.rank == 0 and (path / MANIFEST).is_file():
            is_same = stored_name(step, (path / MANIFEST).read_bytes()) == name
        return broadcast_json(is_same)

    def fetch(self, step: int, report_progress: Callable[[], None]) -> str:
        """Put the checkpoint of `step` into the folder of checkpoints, and return why not if the store's is damaged.

        If the nodes have their own disks, only its manifest and index: the rest is fetched by `fetch_files`.
        """
        name, path = self.names()[step], step_path(self._folder, step)
        damaged, text = broadcast_json(self._manifest(name) if self._rank_layout.rank == 0 else ["", ""])
        if damaged:
            return damaged
        manifest, nonce = parse_manifest(path, text.encode()), broadcast_json(secrets.token_hex(4))
        draft = draft_path(self._folder, step, nonce)
        files = [INDEX] if self._own_disk else list(manifest.files)
        nodes = sorted({*self._rank_layout.nodes})
        parts = {node: files[number :: len(nodes)] for number, node in enumerate(nodes)}
        if why := self._fetch(name, manifest, parts, draft, report_progress):
            return why
        failed = ""
        if self._rank_layout.rank == 0:
            try:
                with report_disk_errors(draft):
                    write_file(draft / MANIFEST, memoryview(text.encode()), DISK)
                    DISK.sync_folder(draft)
                    DISK.rename(draft, path)
                    DISK.sync_folder(self._folder)
            except UserError as error:
                failed = error.what
        return broadcast_json(failed)

    def fetch_files(
        self, path: Path, manifest: Manifest, missing: Mapping[int, set[str]], report_progress: Callable[[], None]
    ) -> str:
        """Put the files that are `missing`, by node, into the folder of a checkpoint; return what is damaged."""
        parts = {node: sorted(names) for node, names in missing.items()}
        if not self._own_disk:
            names, nodes = sorted(set[str]().union(*missing.values())), sorted(missing)
            parts = {node: names[number :: len(nodes)] for number, node in enumerate(nodes)}
        return self._fetch(self.names()[manifest.step], manifest, parts, path, report_progress)

    def _manifest(self, name: str) -> list[str]:
        """Return why the manifest cannot be used, and its text."""
        try:
            return ["", self._client.call("manifest", name=name)]
        except DamagedInStoreError as error:
            return [str(error), ""]
        except (StoreError, UserError) as error:
            return [f"it cannot be read from the store: {error}", ""]

    def _fetch(
        self,
        name: str,
        manifest: Manifest,
        parts: Mapping[int, list[str]],
        folder: Path,
        report_progress: Callable[[], None],
    ) -> str:
        """Fetch the files in `parts`, by node; return what is damaged. Raises UserError if the store cannot be read."""
        layout = self._rank_layout
        files = parts.get(layout.node, []) if layout.rank == layout.node else []
        outcome: list[Any] = [[], ""]
        fetching: list[threading.Thread] = []
        if files:
            log.info("fetching %d files of step %d from %s", len(files), manifest.step, self._client.url)
            records = {file: manifest.files[file].as_dict() for file in files}
            fields = {"name": name, "records": records, "folder": str(folder)}
            self._client.start()
            fetching.append(threading.Thread(target=self._fetch_part, args=(fields, outcome), daemon=True))
            fetching[0].start()
        # Not one long wait: torch ends collectives after ten minutes.
        while not all_true(not any(thread.is_alive() for thread in fetching)):
            report_progress()
            time.sleep(POLL_SECONDS)
        rows = all_gather_json(outcome)
        if failures := sorted({each for _, each in rows if each}):
            raise unusable_store(self._client.url, "; ".join(failures))
        return "; ".join(sorted({each for found, _ in rows for each in found}))

    def _fetch_part(self, fields: dict[str, Any], outcome: list[Any]) -> None:
        """Fetch files, and set `outcome` to what is damaged, and why it failed."""
        try:
            outcome[0] = self._client.call("fetch", **fields)
        except Exception as error:  # raised on all ranks
            outcome[1] = describe(error)


def run_identity(marker: Path) -> str:
    """Return what identifies a run directory: a digest of its marker file, which is written once."""
    return sha256(marker.read_bytes()).hexdigest()[:16]

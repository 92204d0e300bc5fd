"""A local HTTP server that speaks the parts of the Hugging Face Hub's API that downloads need."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

ROUTES = re.compile(
    r"^/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?$"
)
RESOLVE = re.compile(r"^(?P<kind>/datasets)?/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")


@dataclass(kw_only=True)
class FakeRepo:
    """A repository: its files, by the commit that the branch `main` points to."""

    folder: Path
    sha: str = "0123456789abcdef0123456789abcdef01234567"
    gated: bool = False

    def files(self) -> dict[str, Path]:
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


@dataclass(kw_only=True)
class HubState:
    """What the server has, what it was asked for, and after how many bytes it breaks a connection for a file, once."""

    repos: dict[str, FakeRepo]
    requests: list[str] = field(default_factory=list)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    break_after: dict[str, int] = field(default_factory=dict)

    def fetched(self) -> set[str]:
        """Names of the files whose content was sent."""
        return {each.rpartition("/")[2] for each in self.requests if each.startswith("GET") and "/resolve/" in each}


class HubHandler(BaseHTTPRequestHandler):
    """Answers for the repositories in `state`."""

    state: ClassVar[HubState]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        if found := RESOLVE.match(path):
            self._send_file(found, f"{found['kind'] or ''}/{found['name']}".strip("/"))
        elif found := ROUTES.match(path):
            prefix = "datasets/" if found["kind"] == "datasets" else ""
            self._describe(found, f"{prefix}{found['name']}", body)
        else:
            self._refuse(404, "NotFound")

    def _repo(self, name: str, revision: str | None) -> FakeRepo | None:
        repo = self.state.repos.get(name)
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        if repo.gated:
            return self._refuse(403, "GatedRepo")
        if revision not in (None, "main", repo.sha):
            return self._refuse(404, "RevisionNotFound")
        return repo

    def _describe(self, found: re.Match[str], name: str, body: bytes) -> None:
        repo = self._repo(name, found["revision"])
        if repo is None:
            return
        files = [
            {"type": "file", "path": path, "size": file.stat().st_size, "oid": _digest(file)}
            for path, file in repo.files().items()
        ]
        if found["what"] == "tree":
            self._send_json(_entries(files, found["path"] or "", "recursive=true" in self.path.lower()))
        elif found["what"] == "paths-info":
            asked = re.findall(r"paths[^a-zA-Z0-9]+([\w./-]+)", unquote(body.decode())) or json.loads(body)["paths"]
            self._send_json([each for each in files if each["path"] in asked])
        else:
            siblings = [{"rfilename": each["path"], "size": each["size"], "blobId": each["oid"]} for each in files]
            self._send_json({"id": name.removeprefix("datasets/"), "sha": repo.sha, "private": False, "gated": False,
                             "tags": [], "downloads": 0, "siblings": siblings})  # fmt: skip

    def _send_file(self, found: re.Match[str], name: str) -> None:
        repo = self._repo(name, found["revision"])
        if repo is None:
            return
        file = repo.files().get(found["path"])
        if file is None:
            self._refuse(404, "EntryNotFound")
            return
        data, begin = file.read_bytes(), 0
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            begin = int(wanted[1])
            self.state.ranges.append((found["path"], self.headers["Range"]))
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("X-Repo-Commit", repo.sha)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        part = data[begin:]
        if (limit := self.state.break_after.pop(found["path"], None)) is not None:
            part = part[:limit]
            self.close_connection = True
        self.wfile.write(part)
        self.wfile.flush()

    def _send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entries(files: list[dict[str, Any]], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files under `folder`; if not recursive, its own files and its subfolders."""
    prefix = f"{folder}/" if folder else ""
    inside = [each for each in files if each["path"].startswith(prefix)]
    here = [each for each in inside if "/" not in each["path"].removeprefix(prefix)]
    folders = {prefix + each["path"].removeprefix(prefix).partition("/")[0] for each in inside if each not in here}
    below = [{"type": "directory", "path": each, "oid": "0" * 40, "size": 0} for each in sorted(folders)]
    return below + (inside if recursive else here)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server(state: HubState) -> Iterator[str]:
    """Serve the repositories of `state`, and yield the address for HF_ENDPOINT."""
    handler = type("BoundHubHandler", (HubHandler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

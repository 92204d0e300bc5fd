"""A real S3 server on this machine, for tests of the object store: moto's, over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import pytest

NEEDS_S3 = pytest.mark.skipif(
    any(find_spec(each) is None for each in ("moto", "flask", "s3fs")),
    reason="needs pip install 'moto[server]' s3fs",
)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "canary-secret-0123456789",
    "AWS_REGION": "us-east-1",
}


class S3Server:
    """The server's process; `environment` is what clients need, with credentials."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment: Mapping[str, str] = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", self.port)) and time.monotonic() < deadline:
            time.sleep(0.1)

    def pause(self) -> None:
        """Stop answering, as if the network were cut."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    """Run a server with an empty bucket; its environment is this process's, too, until the end."""
    server, before = S3Server(), dict(os.environ)
    os.environ.update(server.environment)
    try:
        import_module("s3fs").S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.process.kill()
        server.process.wait()

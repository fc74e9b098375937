"""A real S3 server: JuiceFS's gateway, over a file system of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from juicefs import juicefs
from processes import Program
from serving import free_port

SECONDS = 20


class S3(NamedTuple):
    """Where it answers, and its one bucket."""

    host: str
    port: int
    bucket: str = "bucket"

    def environ(self, port: int | None = None) -> dict[str, str]:
        """Return what its clients need; `port` is that of a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "not-to-be-seen",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{self.host}:{port or self.port}",
        }


@contextlib.contextmanager
def running(base: Path) -> Iterator[S3]:
    """Run a gateway that keeps everything below `base`; skip, with the reason, without one."""
    program = juicefs()
    meta = f"sqlite3://{base}/meta.db"
    s3 = S3("127.0.0.1", free_port())
    where = ["--storage", "file", "--bucket", f"{base}/blocks/", "--trash-days=0"]
    done = subprocess.run(
        [program, "format", *where, meta, s3.bucket], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    environ = {"MINIO_ROOT_USER": "tester", "MINIO_ROOT_PASSWORD": "not-to-be-seen"}
    options = ["--no-banner", "--no-usage-report", "--keep-etag", f"--log={base}/gateway.log"]
    command = [program, "gateway", *options, f"--cache-dir={base}/cache", meta]
    with Program(
        [*command, f"{s3.host}:{s3.port}"], os.environ | environ, base / "gateway.out"
    ) as gateway:
        deadline = time.monotonic() + SECONDS
        while not _answers(s3):
            assert gateway.process.poll() is None, gateway.last_lines()
            assert time.monotonic() < deadline, gateway.last_lines()
            time.sleep(0.05)
        yield s3


def _answers(s3: S3) -> bool:
    import http.client

    connection = http.client.HTTPConnection(s3.host, s3.port, timeout=1)
    try:
        connection.request("GET", "/minio/health/live")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()

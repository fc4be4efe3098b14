"""Object stores for tests: `def test_something(s3: S3) -> None`.

    volume = open_volume(s3.url)                 s3://bucket/prefix, a fresh bucket for each test
    s3.proxy.fail(503, count=3)                  see `support.s3proxy`
    start("+recipe=job", f"...remote={s3.url}")  runs find the store too: `s3.environment` is in os.environ

Guarantee: the server is a real one over HTTP, one for the session; nothing of it is left after the session.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support import s3server
from support.s3proxy import S3Proxy

_number = itertools.count(1)


@dataclass(frozen=True)
class S3:
    """A bucket behind a proxy.

    Args:
        url: `s3://bucket/prefix`.
        bucket: Its name.
        environment: The variables with which clients find and may use it.
        proxy: What lies between.
        server: What keeps the objects: asked directly it meets no faults.
    """

    url: str
    bucket: str
    environment: dict[str, str]
    proxy: S3Proxy
    server: s3server.S3Server


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket of a real S3 server, behind a proxy with faults."""
    server = s3server.server()
    request.config.add_cleanup(s3server.stop)
    bucket = f"bucket-{next(_number)}-{os.getpid()}"
    server.make_bucket(bucket)
    proxy = S3Proxy(server.port)
    environment = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield S3(f"s3://{bucket}/prefix", bucket, environment, proxy, server)
    finally:
        proxy.close()
        server.forget()

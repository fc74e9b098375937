from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

from entrypoint.errors import ConfigError, NotFoundError, StoreError
from entrypoint.store import bucket, transfer
from entrypoint.store.base import open_store
from entrypoint.store.bucket import ASKING, Bucket, asking, connect, parse, reason_of


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1/a/b/", "s3://my.bucket-1/a/b"),
        ("gs://bucket/prefix", "gs://bucket/prefix"),
        ("az://container/prefix", "az://container/prefix"),
        ("S3://bucket/A", "s3://bucket/A"),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url: str, where: str) -> None:
    assert open_store(url).where == where


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bucket:9000/x",
        "s3://[::1]/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/.hidden",
        "gs://bücket/x",
        "az://con tainer",
        "https://s3.amazonaws.com/bucket",
        "s3a://bucket/x",
    ],
)
def test_other_urls_are_refused_with_what_was_expected(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "expected" in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "url", ["user:HUSHHUSH@host:/x", "file:///x?token=HUSHHUSH", "file://host/x#HUSHHUSH"]
)
def test_what_may_hold_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "HUSH" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAUSER:HUSHHUSH@bucket/x",
        "s3://HUSHHUSH@bucket",
        "gs://user:HUSHHUSH@bucket/x?y",
        "https://user:HUSHHUSH@host/x",
        "file://user:HUSHHUSH@host/x",
        "az://container/x?sig=HUSHHUSH",
        "s3://bucket?X-Amz-Signature=HUSHHUSH",
        "s3://bucket/x#HUSHHUSH",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    said = f"{caught.value} {caught.value.hint}"
    assert "environment" in said
    assert "HUSH" not in said
    assert "AKIA" not in said


def test_a_missing_obstore_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="obstore, which is not installed") as caught:
        open_store("s3://bucket/x")
    assert caught.value.hint == f"{sys.executable} -m pip install obstore"


def test_opening_a_store_imports_no_client() -> None:
    program = (
        "import sys; from entrypoint.store.base import open_store; open_store('s3://bucket/x');"
        "sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


S3_KEYS = {"AWS_ACCESS_KEY_ID": "AKIAKEY", "AWS_SECRET_ACCESS_KEY": "HUSH"}
AZURE_KEYS = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "SFVTSA=="}


@pytest.mark.parametrize(
    ("scheme", "environ", "signed"),
    [
        (
            "s3",
            S3_KEYS | {"AWS_REGION": "eu-west-1"},
            r"https://s3\.eu-west-1\.amazonaws\.com/bucket/a/b/x\?.*Credential=AKIAKEY",
        ),
        (
            "s3",
            S3_KEYS | {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_SESSION_TOKEN": "passing"},
            r"http://minio:9000/bucket/a/b/x\?.*Token=passing",
        ),
        ("az", AZURE_KEYS, r"https://account\.blob\.core\.windows\.net/bucket/a/b/x\?.*sig="),
    ],
)
def test_credentials_and_endpoints_come_from_the_environment(
    scheme: str, environ: dict[str, str], signed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    client: Any = connect(Bucket(scheme, "bucket", "a/b"), ASKING)
    assert re.match(signed, obstore.sign(client, "GET", "x", timedelta(minutes=1)))


def test_a_google_client_is_made_of_a_bucket_and_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    client: Any = connect(Bucket("gs", "bucket", "a/b"), ASKING)
    assert (client.config["bucket"], client.prefix) == ("bucket", "a/b")


def test_what_a_cloud_needs_and_the_environment_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"az://container: .*Account must be specified") as caught:
        connect(parse("az", "container"), ASKING)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint


def test_credentials_that_cannot_be_read_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    key = tmp_path / "key.json"
    key.write_text('{"private_key": "HUSHHUSH"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(StoreError, match="gs://bucket: ") as caught:
        connect(parse("gs", "bucket"), ASKING)
    assert "HUSH" not in str(caught.value)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint


EXPIRED = (
    "<Error><Code>ExpiredToken</Code><Message>It has expired.</Message>"
    "<Token-0>HUSHHUSH</Token-0></Error>"
)
ANSWER = (
    "Generic S3 error: Error performing GET http://host:9000/bucket/x?X-Amz-Signature=HUSH in 3ms, "
    "after 4 retries, max_retries: 4, retry_timeout: 5s  - Server returned non-2xx status code: "
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            f"{ANSWER}400 Bad Request: {EXPIRED}",
            "400 Bad Request: ExpiredToken: It has expired. (tried 5 times)",
        ),
        (
            f"{ANSWER}503 Service Unavailable: <Error><Code>SlowDown</Code></Error>",
            "503 Service Unavailable: SlowDown (tried 5 times)",
        ),
        (f"{ANSWER}502 Bad Gateway: HUSH", "502 Bad Gateway (tried 5 times)"),
        (
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s",
            "no credentials in the environment, and none from a metadata service",
        ),
        ("Generic S3 error: HTTP error: operation timed out", "no answer in time"),
        (
            "Generic S3 error: error sending request\n\nDebug source:\nConnectionRefused",
            "no connection",
        ),
        (
            "Generic S3 error: HTTP error: request or response body error\n\nIncompleteMessage",
            "the connection broke before the answer ended",
        ),
        ("Something new at https://user:HUSH@host/x?sig=HUSH\nmore", "Something new at …"),
    ],
)
def test_an_error_is_said_in_few_words_without_what_it_repeats(text: str, says: str) -> None:
    assert reason_of(text) == says


def test_errors_name_the_store_and_what_to_do() -> None:
    text = "status code: 400 Bad Request: <Code>ExpiredToken</Code>"
    with (
        pytest.raises(StoreError, match="s3://bucket/x: 400 Bad Request") as caught,
        asking("s3://bucket/x"),
    ):
        raise GenericError(text)
    assert caught.value.hint == "renew the credentials"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("code", "kind"), [("NoSuchKey", NotFoundError), ("NoSuchBucket", StoreError)]
)
def test_a_missing_object_is_not_found_and_a_missing_bucket_is_no_store(
    code: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind), asking("s3://bucket"):
        raise FileNotFoundError(f"status code: 404 Not Found: <Code>{code}</Code>")


def test_patience_has_an_end() -> None:
    for patience in (bucket.ASKING, bucket.READING, bucket.WRITING):
        assert patience.trying + patience.request < transfer.STALL_SECONDS
    assert bucket.ASKING.trying + bucket.ASKING.silence <= 10

"""A server that speaks S3's protocol, in this process: moto's."""

import contextlib
from collections.abc import Iterator, Mapping

import pytest

BUCKET = "weights"


@contextlib.contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with one empty bucket, for this process and those that it starts; gives the bucket's URL."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    # fsspec keeps a connection by its arguments, and an earlier test's server had another port.
    s3fs.S3FileSystem.clear_instance_cache()
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in _environment(f"http://{host}:{port}").items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def _environment(endpoint: str) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a-member",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

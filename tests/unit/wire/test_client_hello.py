"""`wire.client_hello`: hellos of real TLS clients, cut and mixed up; bytes that are none."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import each
from wire.client_hello import MOST_BYTES, ClientHello, read_client_hello


def hello(server_name: str | None = None, protocols: tuple[str, ...] = (), *, oldest: bool = False) -> bytes:
    """What this Python's TLS says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if oldest:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    if protocols:
        context.set_alpn_protocols(list(protocols))
    outgoing = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same handshake message in TLS records of at most `size` bytes."""
    body = data[5:]
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2) + piece for piece in pieces)


@each("oldest", [False, True])
@each("name", [None, "control.books-abcde", "Coordinator.books-abcde"])
@each("protocols", [(), ("h2",), ("h2", "http/1.1")])
def test_a_real_clients_hello(name: str | None, protocols: tuple[str, ...], oldest: bool) -> None:
    expected = ClientHello(name or "", protocols)
    data = hello(name, protocols, oldest=oldest)
    assert read_client_hello(data) == expected
    assert read_client_hello(data + b"more") == expected
    assert read_client_hello(in_records(data, 20)) == expected


@pytest.mark.parametrize("size", [7, 100_000])
def test_a_hello_says_how_many_bytes_it_takes(size: int) -> None:
    """Each answer asks for more than is there, and never for more than the hello has."""
    data = in_records(hello("control.books-abcde", ("h2",)), size)
    for length in range(len(data)):
        needed = read_client_hello(data[:length])
        assert isinstance(needed, int)
        assert length < needed <= len(data)


@each(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x00",
        b"\x17\x03\x03\x00\x05hello",
        b"\x16\x02\x00\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # a server hello
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",  # 16 MiB of hello
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03",  # ends within the version
    ],
)
def test_bytes_that_are_not_a_client_hello(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_client_hello(data)


@given(st.data())
def test_a_damaged_hello_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever the bytes, there is an answer within bounds and no other error."""
    good = bytearray(in_records(hello("control.books-abcde", ("h2", "http/1.1")), 200))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    answer_is_bounded(bytes(good[: data.draw(st.integers(0, len(good)))]))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    answer_is_bounded(data)
    answer_is_bounded(b"\x16\x03\x01" + len(data).to_bytes(2) + data)
    answer_is_bounded(b"\x16\x03\x01" + (len(data) + 4).to_bytes(2) + b"\x01" + len(data).to_bytes(3) + data)


def answer_is_bounded(data: bytes) -> None:
    try:
        answer = read_client_hello(data)
    except ValueError:
        return
    if isinstance(answer, int):
        assert len(data) < answer <= MOST_BYTES + 5

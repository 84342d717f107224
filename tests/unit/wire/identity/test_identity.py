"""The run's certificate authority, node identities and their files."""

import codecs
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from node.data.text import expanded
from tests.support.cases import each
from tests.support.homes import without_home
from wire.errors import ConfigError, LinkError, Refused, UserError
from wire.identity.authority import (
    ISSUER_CERTIFICATE_OID,
    CertificateAuthority,
    authority_run_id,
    csr_public_key,
    is_issued_by,
    key_to_pem,
    public_key_hash,
    read_certificate,
)
from wire.identity.credentials import (
    NodeIdentity,
    default_directory,
    load_key,
    load_or_create_key,
    make_csr,
)
from wire.identity.files import (
    cache_folder,
    create_private,
    make_private_directory,
    state_folder,
    write_private,
)
from wire.identity.names import (
    is_node_id,
    is_run_id,
    join_address,
    new_run_id,
    node_id_of,
    split_address,
)

NOW = 1_800_000_000.0
DAY = timedelta(hours=24)


def make_identity(authority: CertificateAuthority) -> NodeIdentity:
    key = ec.generate_private_key(ec.SECP256R1())
    node_id = node_id_of(public_key_hash(key.public_key()))
    certificate = authority.issue_node(key.public_key(), node_id, DAY, NOW)
    return NodeIdentity(node_id, authority.run_id, key_to_pem(key), certificate, authority.certificate_pem)


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("run-a", NOW)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_survives_its_files(authority: CertificateAuthority, tmp_path: Path) -> None:
    authority.save(tmp_path / "run")
    loaded = CertificateAuthority.load(tmp_path / "run")
    assert (loaded.run_id, loaded.pin) == (authority.run_id, authority.pin)
    assert loaded.certificate_pem == authority.certificate_pem
    assert make_identity(loaded).pin == authority.pin
    assert mode(tmp_path / "run") == 0o700
    assert mode(tmp_path / "run" / "ca.key") == 0o600


@pytest.mark.parametrize("name", ["ca.key", "ca.pem"])
def test_a_damaged_authority_says_so(authority: CertificateAuthority, tmp_path: Path, name: str) -> None:
    authority.save(tmp_path)
    (tmp_path / name).write_bytes(b"torn")
    with pytest.raises(UserError, match="damaged"):
        CertificateAuthority.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match="holds no certificate authority"):
        CertificateAuthority.load(tmp_path)


def test_an_authority_of_mixed_files_is_refused(authority: CertificateAuthority, tmp_path: Path) -> None:
    authority.save(tmp_path)
    CertificateAuthority.create("run-b", NOW).save(tmp_path / "other")
    (tmp_path / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(UserError, match="damaged"):
        CertificateAuthority.load(tmp_path)


def test_a_node_certificate_says_what_it_must(authority: CertificateAuthority) -> None:
    identity = make_identity(authority)
    certificate = x509.load_pem_x509_certificate(identity.certificate_pem)
    assert certificate.subject == x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.node_id)])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(f"{identity.node_id}.nodes.run-a")]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and not constraints.value.ca
    assert certificate.not_valid_before_utc.timestamp() == NOW - 3600
    assert identity.expires_at == NOW + 86400


def test_the_coordinator_certificate_carries_its_issuer(authority: CertificateAuthority) -> None:
    key_pem, certificate_pem = authority.coordinator_credentials(DAY, NOW)
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    expected = ("coordinator.run-a", "control.run-a", "session.run-a", "join.thinwire")
    assert list(names) == [x509.DNSName(name) for name in expected]
    extension = certificate.extensions.get_extension_for_oid(ISSUER_CERTIFICATE_OID)
    assert isinstance(extension.value, x509.UnrecognizedExtension)
    assert not extension.critical
    issuer = x509.load_der_x509_certificate(extension.value.value)
    assert is_issued_by(certificate, issuer) and is_issued_by(issuer, issuer)
    assert load_key(key_pem).public_key() == certificate.public_key()


def test_only_the_key_is_taken_from_a_request(authority: CertificateAuthority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator.run-a")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("coordinator.run-a")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    found = csr_public_key(request.public_bytes(serialization.Encoding.DER))
    certificate = authority.issue_node(found, "node-aaaaaaaaaa", DAY, NOW)
    # Holds the names and rights of a node, or this raises.
    NodeIdentity("node-aaaaaaaaaa", "run-a", key_to_pem(key), certificate, authority.certificate_pem)
    issued = x509.load_pem_x509_certificate(certificate)
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_tampered_request_is_refused() -> None:
    csr = make_csr(key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    other = make_csr(key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    key, other_key = (
        csr_public_key(request).public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        for request in (csr, other)
    )
    with pytest.raises(ValueError, match="not signed"):
        csr_public_key(csr.replace(key, other_key))
    for broken in (b"", csr[:-1], b"\x30" + bytes(50)):
        with pytest.raises(ValueError, match=r"."):
            csr_public_key(broken)


def test_a_request_of_another_version_is_refused() -> None:
    csr = make_csr(key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    with pytest.raises(ValueError, match="5 is not a valid CSR version"):
        csr_public_key(csr.replace(b"\x02\x01\x00", b"\x02\x01\x05", 1))


def test_a_certificate_is_read_in_both_forms_or_refused(authority: CertificateAuthority) -> None:
    der = authority.certificate.public_bytes(serialization.Encoding.DER)
    for form in (der, authority.certificate_pem, b"\n" + authority.certificate_pem):
        assert read_certificate(form) == authority.certificate
    version = bytes((0xA0, 3, 2, 1))
    another = der.replace(version + b"\2", version + b"\5")
    assert another != der
    for broken in (b"", der[:-1], authority.certificate_pem[:99], another):
        with pytest.raises(ValueError, match=r"."):
            read_certificate(broken)


def test_a_certificate_with_a_non_text_name_names_no_run(authority: CertificateAuthority) -> None:
    assert authority_run_id(authority.certificate) == authority.run_id
    der = authority.certificate.public_bytes(serialization.Encoding.DER)
    assert authority_run_id(read_certificate(der.replace(b"thinwire run", b"\xff" * 12))) is None


def test_a_request_with_another_kind_of_key_is_refused() -> None:
    for key in (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)):
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        csr = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
        with pytest.raises(ValueError, match="not on P-256"):
            csr_public_key(csr)


def test_an_identity_survives_its_files(authority: CertificateAuthority, tmp_path: Path) -> None:
    identity = make_identity(authority)
    directory = tmp_path / "state" / "node"
    assert NodeIdentity.load(directory) is None
    identity.save(directory)
    assert NodeIdentity.load(directory) == identity
    (directory / "node.key").write_bytes(codecs.BOM_UTF8 + identity.key_pem)
    assert NodeIdentity.load(directory) == identity
    identity.save(directory)
    assert mode(directory) == 0o700
    assert {mode(file) for file in directory.iterdir()} == {0o600}
    assert {file.name for file in directory.iterdir()} == {"node.key", "identity.json"}


def test_a_second_node_does_not_overwrite_the_first(authority: CertificateAuthority, tmp_path: Path) -> None:
    first = make_identity(authority)
    first.save(tmp_path)
    with pytest.raises(UserError, match="directory of its own"):
        make_identity(authority).save(tmp_path)
    assert NodeIdentity.load(tmp_path) == first


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"node_id": 3}', b"\xff", b'{"node_id": "node-'])
def test_a_damaged_identity_says_so(authority: CertificateAuthority, tmp_path: Path, content: bytes) -> None:
    make_identity(authority).save(tmp_path)
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(UserError, match="damaged: delete the directory"):
        NodeIdentity.load(tmp_path)


def test_an_identitys_key_and_certificate_belong_together(authority: CertificateAuthority) -> None:
    ours, theirs = make_identity(authority), make_identity(authority)
    with pytest.raises(ValueError, match="another node"):
        replace(ours, certificate_pem=theirs.certificate_pem)
    with pytest.raises(ValueError, match="another key"):
        replace(ours, key_pem=theirs.key_pem)
    with pytest.raises(ValueError, match="another node"):
        replace(ours, run_id="run-b")
    with pytest.raises(ValueError, match="another authority"):
        replace(ours, ca_pem=CertificateAuthority.create("run-a", NOW).certificate_pem)


def test_a_renewed_identity_keeps_its_name_and_key(authority: CertificateAuthority) -> None:
    identity = make_identity(authority)
    key = csr_public_key(identity.csr_der())
    later = identity.renewed(authority.issue_node(key, identity.node_id, DAY, NOW + 1000))
    assert later.expires_at == identity.expires_at + 1000
    assert (later.node_id, later.key_pem) == (identity.node_id, identity.key_pem)
    with pytest.raises(Refused, match="cannot be used"):
        identity.renewed(make_identity(authority).certificate_pem)
    with pytest.raises(Refused, match="cannot be used"):
        identity.renewed(b"torn")


def test_renewal_is_spread_over_the_middle_of_the_lifetime(authority: CertificateAuthority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    moments = []
    for number in range(60):
        node_id = node_id_of(bytes([number]) * 32)
        certificate = authority.issue_node(key.public_key(), node_id, DAY, NOW)
        identity = NodeIdentity(node_id, "run-a", key_to_pem(key), certificate, authority.certificate_pem)
        moments.append((identity.renewal_time - NOW) / 86400)
        assert identity.renewal_time == replace(identity).renewal_time
    assert 0.5 <= min(moments) < 0.55 and 0.75 < max(moments) <= 0.8


@pytest.mark.parametrize("hours", [-1.0, -0.5, 0.0, 1.0, 4.7])
def test_a_clock_by_which_neighbours_certificates_hold_will_do(
    authority: CertificateAuthority, hours: float
) -> None:
    make_identity(authority).check_clock(NOW + 3600 * hours)


@pytest.mark.parametrize(
    ("hours", "line"),
    [(-1.1, "1.1 hours behind"), (4.9, "4.9 hours ahead of"), (50.0, "50.0 hours ahead of")],
)
def test_another_clock_is_to_be_set(authority: CertificateAuthority, hours: float, line: str) -> None:
    with pytest.raises(LinkError, match=f"clock is {line} the coordinator's, .*: set the clock"):
        make_identity(authority).check_clock(NOW + 3600 * hours)


def test_validity_counts_the_margin(authority: CertificateAuthority) -> None:
    identity = make_identity(authority)
    assert identity.is_valid(NOW) and identity.is_valid(NOW - 3600)
    assert not identity.is_valid(NOW - 3601)
    assert identity.is_valid(NOW + 86399) and not identity.is_valid(NOW + 86400)
    assert not identity.is_valid(NOW + 86399, timedelta(seconds=10))


def test_keys_do_not_show_in_repr(authority: CertificateAuthority) -> None:
    assert "PRIVATE" not in repr(make_identity(authority))


def test_the_key_in_a_directory_is_made_once(tmp_path: Path) -> None:
    pem = load_or_create_key(tmp_path / "node")
    assert load_or_create_key(tmp_path / "node") == pem
    assert mode(tmp_path / "node" / "node.key") == 0o600
    (tmp_path / "node" / "node.key").write_bytes(codecs.BOM_UTF8 + pem)
    assert load_or_create_key(tmp_path / "node") == pem
    (tmp_path / "node" / "node.key").write_bytes(pem[:40])
    with pytest.raises(UserError, match="damaged"):
        load_or_create_key(tmp_path / "node")


def test_the_default_directory_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert default_directory("run-a", "gpu0") == tmp_path / ".local/state/thinwire/run-a/gpu0"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_directory("run-a") == Path("/var/state/thinwire/run-a/node")


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_a_home_is_told_which_variable_to_set(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_home(monkeypatch)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(UserError, match="HOME or XDG_CACHE_HOME"):
        cache_folder()
    with pytest.raises(ConfigError, match=r"data\.path '~/text'.*no home"):
        expanded("~/text", "data.path")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/thinwire")


def test_a_user_without_home_variable_has_the_one_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_dir="/home/someone"))
    assert state_folder() == Path("/home/someone/.local/state/thinwire")
    assert expanded("~/text", "data.path") == Path("/home/someone/text")


def test_private_files_are_written_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert create_private(path, b"one") == b"one"
    assert create_private(path, b"two") == b"one"
    write_private(path, b"three")
    assert path.read_bytes() == b"three"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("write", [create_private, write_private])
def test_a_full_disk_error_names_the_file(
    write: Callable[[Path, bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a write carries no name, and would be taken for one of the screen."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "file", b"x")
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_private_directory_is_made_so_and_another_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private_directory(tmp_path / "a" / "new")
    assert mode(tmp_path / "a" / "new") == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    make_private_directory(shared)
    assert mode(shared) == 0o1777
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        make_private_directory(shared)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_directory(tmp_path / "file")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("host:1", ("host", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:7700", ("::1", 7700))],
)
def test_addresses_are_split_and_joined(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected
    assert join_address(*expected) == address


@each(
    "address",
    [
        *("", "host", "host:", ":1", "host:0", "host:65536", "::1:7700", "h:1x", "h:²"),
        *("a b:1", "a\tb:1", "a\u2003b:1", "a\0b:1", "a\x1b[31m:1", "[::1%\x1b]:1", "a\udc80:1"),
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        split_address(address)


def test_names_fit_their_forms() -> None:
    assert is_node_id(node_id_of(bytes(32))) and node_id_of(bytes(32)) != node_id_of(b"\1" * 32)
    assert not is_node_id("coordinator.run-a")
    for name in ("", "My Run!", "ümlaut", "x" * 99, "a" * 31 + "-b", "---"):
        assert is_run_id(new_run_id(name)), name
    assert new_run_id("run") != new_run_id("run")
    for bad in ("", "-a", "a-", "A", "a.b", "x" * 41):
        assert not is_run_id(bad)
        with pytest.raises(ValueError, match="not a run id"):
            CertificateAuthority.create(bad, NOW)

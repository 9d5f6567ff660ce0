"""TLS certificates and node keys for a rehearsal: a private CA, the server's certificate, and a key
for every node.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kairosfl.engines.flower.roster import fingerprint, save
from kairosfl.errors import UserError

LONGEST_NAME, LONGEST_HOST = 64, 253  # characters of a common name, and of a name in DNS
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
LIFETIME = datetime.timedelta(
    days=90
)  # short: these are for rehearsals; a deployment has its own CA


def certs(
    path: Path, *, nodes: int, hosts: Sequence[str] = ("localhost", "127.0.0.1")
) -> list[Path]:
    """Create TLS certificates for a server at these hosts, and node keys; client i is bound to the
    key of node i.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path} already exists and is not an empty directory; keys are never overwritten, choose a new one."
        )
    if nodes < 1 or not hosts:
        raise UserError(
            f"--nodes {nodes} must be 1 or more, and --host must name the server at least once."
        )
    for host in hosts:
        check_host(host)
    path.mkdir(parents=True, exist_ok=True)
    authority(path, hosts)
    save(path / "roster.json", {i: fingerprint(node_key(path / f"node-{i}")) for i in range(nodes)})
    return sorted(path.iterdir())


def authority(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt`, and the server's `server.pem` and `server.key` for these host names and
    addresses.
    """
    ca_key, server_key = (
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP384R1()),
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Kairos rehearsal")])
    usage = x509.KeyUsage(
        False, False, False, False, False, True, True, False, False
    )  # may sign certificates
    ca = (
        _certificate(name, ca_key, name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        _certificate(_subject(hosts[0]), server_key, name)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    # The CA's private key is not saved, so nobody can issue another certificate that these nodes
    # would trust.
    _write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM))
    _write(
        folder / "server.key", _private(server_key, serialization.PrivateFormat.PKCS8), secret=True
    )


def node_key(path: Path) -> bytes:
    """Write a node's key pair to `path` and `path.pub`; return the public key as the server sees
    it.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key()
    _write(path, _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(path.with_name(path.name + ".pub"), line + b"\n")
    seen: bytes = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return seen


def _subject(host: str) -> x509.Name:
    """The name of the server; where it is longer than X.509 allows, only the alternative names have
    it.
    """
    shown = host if len(host) <= LONGEST_NAME else "Kairos server"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, shown)])


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # allow for clock skew
        .not_valid_after(now + LIFETIME)
    )


def check_host(host: str) -> None:
    """Refuse what no certificate can name: neither an address nor a host name."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not host.isascii():
        with suppress(UnicodeError):
            spelled = host.encode("idna").decode()
            raise UserError(f"--host {host!r} is not ASCII; write it as in DNS, {spelled}.")
    labels = host.removeprefix("*.").split(".")
    numeric = labels[-1].isdecimal()  # 999.1.1.1, which was meant as an address
    if numeric or len(host) > LONGEST_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise UserError(
            f"--host {host!r} is neither a host name nor an IP address; give the name under which nodes reach the "
            "server, such as fl.example.org or 192.0.2.7."
        )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    content: bytes = key.private_bytes(
        serialization.Encoding.PEM, form, serialization.NoEncryption()
    )
    return content


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)
    with os.fdopen(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb"
    ) as file:
        file.write(content)
    os.replace(temporary, path)

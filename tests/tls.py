"""TLS for tests: certificates that sign themselves, and a front that gives a server TLS."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(key: rsa.RSAPrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def certificate_file(
    path: Path, key: rsa.RSAPrivateKey, *, address: str = "127.0.0.1", ends_in_s: float = 3600.0
) -> Path:
    """`path`, which now holds the key and a certificate that it signed for `address`."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=2))
        .not_valid_after(now + datetime.timedelta(seconds=ends_in_s))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_text(pem(key) + made.public_bytes(serialization.Encoding.PEM).decode())
    return path


class TlsFront:
    """Listens at `endpoint` with TLS and passes everything on to a server that has none."""

    def __init__(self, upstream: str, certificate: Path) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            suppress(OSError),
            plain,
            self._context.wrap_socket(plain, server_side=True) as client,
            socket.create_connection(self._upstream) as server,
        ):
            back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
            back.start()
            self._pass_on(client, server)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_bytes += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

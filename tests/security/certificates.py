"""Certificates for the tests: two authorities, and what each of them signed."""

import subprocess
from pathlib import Path

_CONFIG = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[holder]
basicConstraints = CA:FALSE
subjectAltName = IP:127.0.0.1, DNS:*.pictures.test
authorityKeyIdentifier = keyid
"""


class Authority:
    """Signs certificates; all files are in `directory`, PEM."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        (directory / "openssl.cnf").write_text(_CONFIG)
        self.file, self._key = self._make("authority", "authority")

    def sign(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 with that common name, and its key."""
        return self._make(name, "holder", "-CA", str(self.file), "-CAkey", str(self._key))

    def _make(self, name: str, kind: str, *by: str) -> tuple[Path, Path]:
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-config", str(self._directory / "openssl.cnf"), "-extensions", kind, "-days", "2", *by]
        command += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        return certificate, key

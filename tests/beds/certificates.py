"""Certificates for tests, made by the openssl program."""

import subprocess
from pathlib import Path

CA = """
[ca]
default_ca = here
[here]
database = {at}/index
serial = {at}/serial
new_certs_dir = {at}
default_md = sha256
policy = any
[any]
commonName = supplied
"""
KIND = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
"""RSA takes ten times as long, at each start of a bed."""


def make_certificate(
    directory: Path, name: str, files: tuple[str, str] = ("cert.pem", "key.pem")
) -> None:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    command = ["openssl", "req", "-x509", *KIND, "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(directory / files[0]), "-keyout", str(directory / files[1])]
    subprocess.run(command, check=True, capture_output=True)


def make_expired(directory: Path) -> None:
    """A certificate of the year 2020; only ``openssl ca`` takes dates of the past."""
    (directory / "ca.cnf").write_text(CA.format(at=directory))
    (directory / "index").write_text("")
    (directory / "serial").write_text("01")
    key, request = str(directory / "key.pem"), str(directory / "request.pem")
    make = ["openssl", "req", "-new", *KIND, "-nodes", "-subj", "/CN=old"]
    sign = ["openssl", "ca", "-selfsign", "-batch", "-notext", "-keyfile", key, "-in", request]
    sign += ["-config", str(directory / "ca.cnf"), "-out", str(directory / "cert.pem")]
    sign += ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
    for command in ([*make, "-keyout", key, "-out", request], sign):
        subprocess.run(command, check=True, capture_output=True)

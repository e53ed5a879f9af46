"""HTTPS with a certificate made for the test, over real sockets."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest

from paceline.errors import ConfigError
from paceline.http.tls import check_tls_files
from paceline.server import ServerConfig
from tests.cli.servers import start_server

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", key, "-out", certificate, "-days", 2, "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1",
    )  # fmt: skip
    return certificate, key


def test_everything_is_served_over_https(files: tuple[Path, Path]) -> None:
    certificate, key = files
    flags = (
        "--backend",
        "null",
        "--null-step-time",
        "0.005",
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
    )
    with start_server(*flags) as server:
        assert server.address.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(certificate))
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
        with httpx.Client(base_url=server.address, verify=trust, timeout=30) as http:
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 20
            alone = body | {"stream": True, "speculation": {"max_tokens": 0}}
            # most of a stream is written onto the connection directly
            with http.stream("POST", "/v1/chat/completions", json=alone) as said:
                lines = [line for line in said.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]" and len(lines) > 10
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
            long = {"prompt": "x" * 200_000, "max_tokens": 1}
            assert http.post("/v1/completions", json=long).status_code == 400
        # whoever does not trust the certificate, and whoever speaks no TLS, gets no answer
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.address}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.address.replace("https", "http") + "/health")
        assert urllib.request.urlopen(f"{server.address}/health", context=trust).status == 200
        code, _ = server.stop()
        assert code == 0


def test_a_certificate_that_will_not_do_is_found_before_the_model_is(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = files
    other, locked, text = tmp_path / "other", tmp_path / "locked", tmp_path / "text"
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", other)
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked)
    text.write_text("no certificate")
    for cert, private in (
        (certificate, other),
        (certificate, locked),
        (certificate, None),
        (text, key),
        (tmp_path / "none", key),
    ):
        with pytest.raises(ConfigError, match=r"cannot be (served with|read)"):
            check_tls_files(cert, private)
    both = tmp_path / "both"
    both.write_text(certificate.read_text() + key.read_text())
    check_tls_files(both, None)
    with pytest.raises(ConfigError, match="needs ssl_certfile"):
        ServerConfig(ssl_keyfile=key)
    with pytest.raises(ConfigError, match="cannot be served with"):
        ServerConfig(ssl_certfile=text, ssl_keyfile=key)
    command = [sys.executable, "-m", "paceline.cli.main", "serve", "no-such-model"]
    for flags in (["--ssl-certfile", text], ["--ssl-keyfile", key]):
        done = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True)
        assert done.returncode == 2 and "certificate" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1

"""The token goes to the Hub and nowhere else: not to stdout, stderr, logs, files or tracebacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import hide_tokens
from hybrid_pack.hub.errors import brief
from tests.hub.conftest import REPO, SECRET, child
from tests.hub.server import Hub

FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "none": ("GET", "never", {}),
    "not allowed": ("POST", "", {"status": 403, "times": 99}),
    "not logged in": ("GET", "", {"status": 401, "times": 99}),
    "too many": ("GET", "", {"status": 429, "times": 99}),
    "broken": ("POST", "", {"status": 500, "times": 99}),
    "cut": ("POST", "", {"cut": 0, "times": 99}),
    "nonsense": ("GET", "/api/", {"corrupt": lambda body: b"nonsense", "times": 99}),
    "echo": ("GET", "/api/", {"status": 400, "headers": {"X-Error-Message": f"bad token {SECRET}"}, "times": 99}),
}
COMMANDS = {
    "push": ["push", "PACK", "org/new", "--private"],
    "pull": ["pull", REPO, "--rank", "2", "--out", "OUT"],
    "verify": ["verify", "--remote", REPO],
    "inspect": ["inspect", REPO],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_never_shown(
    fault: str,
    command: str,
    remote: Hub,
    good_pack: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    method, path, what = FAULTS[fault]
    remote.fault(method, path, **what)
    places = {"PACK": str(good_pack), "OUT": str(tmp_path / "out")}
    arguments = [places.get(word, word) for word in COMMANDS[command]]
    with caplog.at_level(logging.DEBUG, "huggingface_hub"):
        code = run(["--debug", *arguments])
    captured = capfd.readouterr()
    assert SECRET in remote.tokens, "it was used"
    assert code in (0, 1, 2, 3)
    assert SECRET not in captured.out + captured.err
    assert SECRET not in caplog.text
    assert [p for p in tmp_path.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api_org_ABCDEFGHIJKLMNOPQRST.", "hf_***."),
        ("Bearer hf_oauth_eyJhbGci.eyJzdWIi-OiIx_x", "Bearer hf_***"),
        ("Bearer%20hf_ABCDEFGHIJKLMNOPQRST", "Bearer%20hf_***"),
        ("token" + "hf_" + "aB" * 17, "tokenhf_***"),
        ("in half_ABCDEFGHIJKLMNOPQRST", "in half_ABCDEFGHIJKLMNOPQRST"),
        ("in hf_hub_download, of hf_home", "in hf_hub_download, of hf_home"),
        (f"a/{SECRET}/b", "a/hf_***/b"),
        ("at 'https://h/p/q?X-Amz-Signature=5ec5e7&a=b'.", "at 'https://h/p/q?***'."),
        ("(https://h:8/p?a) and http://h/?b#c d", "(https://h:8/p?***) and http://h/?*** d"),
        ("PUT /p?partNumber=1&X-Amz-Signature=5ec5e7", "PUT /p?partNumber=1&X-Amz-Signature=***"),
        ("failed ((…)&sig=5ec5e7c0ffee).", "failed ((…))."),
        ("why? see https://h/p", "why? see https://h/p"),
    ],
)
def test_what_is_hidden(text: str, shown: str) -> None:
    assert hide_tokens(text) == shown


def test_a_token_in_a_message_is_hidden() -> None:
    assert brief(ValueError(f"Invalid: Bearer {SECRET}, sorry\nmore")) == "Invalid: Bearer hf_***, sorry"


@pytest.mark.parametrize("what", [{"status": 503, "times": 2}, {"status": 403, "times": 99}], ids=str)
@pytest.mark.parametrize("command", ["push", "pull"])
def test_signed_urls_are_not_shown(
    command: str, what: dict[str, Any], remote: Hub, good_pack: Path, tmp_path: Path
) -> None:
    """Neither by us nor by huggingface_hub's own lines about tries; they let anybody read or write the file."""
    remote.fault("GET" if command == "pull" else "PUT", "/cdn/|/lfs/", **what)
    remote.signature = "X-Amz-Signature=5ec5e7"
    places = {"PACK": str(good_pack), "OUT": str(tmp_path / "out")}
    process = child(remote, tmp_path / "home", *(places.get(word, word) for word in COMMANDS[command]))
    out, err = process.communicate(timeout=120)
    assert process.returncode == (0 if what["status"] == 503 else 3), err
    assert "503" in err or "does not allow it" in err
    assert "5ec5e7" not in out + err
    assert "No files have been modified" not in err

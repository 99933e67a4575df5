"""Reads hf_xet's local store, as a Hub with Xet would."""

from __future__ import annotations

import tempfile
from pathlib import Path


def _xet_hex(raw: bytes) -> str:
    """How Xet writes a hash: four little-endian numbers."""
    return "".join(f"{int.from_bytes(raw[i : i + 8], 'little'):016x}" for i in range(0, 32, 8))


def xet_file(cas: str, sha256: str) -> tuple[bytes | None, str | None]:
    """(content, Xet hash) of a file in hf_xet's local store, found by the SHA-256 its metadata has."""
    import hf_xet

    for shard in Path(cas.removeprefix("local://")).rglob("shards/*.mdb"):
        data, at = shard.read_bytes(), 48
        while data[at : at + 32] != b"\xff" * 32:
            name, flags = data[at : at + 32], int.from_bytes(data[at + 32 : at + 36], "little")
            count = int.from_bytes(data[at + 36 : at + 40], "little")
            at += 48 + 48 * count * (2 if flags >> 31 else 1)
            if flags >> 30 & 1:
                found, at = data[at : at + 32], at + 48
                if _xet_hex(found) == sha256:
                    with tempfile.TemporaryDirectory() as folder:
                        target = Path(folder) / "file"
                        with hf_xet.XetSession().new_file_download_group(endpoint=cas) as group:
                            group.start_download_file(hf_xet.XetFileInfo(_xet_hex(name), None), str(target))
                        return target.read_bytes(), _xet_hex(name)
    return None, None

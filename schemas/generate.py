"""Writes the JSON Schema of the manifest: ``python -m hybrid_pack.schemas.generate``."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_pack.schemas.manifest import FORMAT_VERSION, Manifest

SCHEMA_FILE = Path(__file__).resolve().parent / f"hybrid_pack.v{FORMAT_VERSION}.schema.json"


def schema_text() -> str:
    """The schema as it is committed."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")

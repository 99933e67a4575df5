"""Pydantic models of what is written to disk, and the JSON Schema generated from them."""

"""NF3, the 3-bit code book of the tail tier: eight levels, no zero level, one scale for 32 codes of a row."""

from __future__ import annotations

GROUP = 32
"""Codes of one row that share a scale."""

DEFAULT_LEVELS = (-1.0, -0.6047, -0.3563, -0.1275, 0.1275, 0.3563, 0.6047, 1.0)
"""Code book of b12x 1.1.0 (``_NF3_CODEBOOK``), ascending: code i means ``level[i] * scale``. Kernels use it in BF16."""

SCALE_LIMIT = 32.0
"""Scales at or above it do not fit the device scale byte."""

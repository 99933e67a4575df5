"""E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

VALUES: NDArray[np.float64] = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=np.float64)
"""f64 [16]: value of code ``0bSEEM``; code 8 is -0."""

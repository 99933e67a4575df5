"""E8M0, the power-of-two block scale of MXFP4 and MXFP8 (OCP Microscaling Formats v1.0, section 5.4.1): bias 127."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BIAS = 127
NAN_BYTE = 0xFF


def _values() -> NDArray[np.float64]:
    values = np.ldexp(1.0, np.arange(256) - BIAS)
    values[NAN_BYTE] = np.nan
    return values


VALUES: NDArray[np.float64] = _values()
"""f64 [256]: value of each byte; 0 is 2^-127, 255 is NaN."""

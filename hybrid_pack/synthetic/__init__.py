"""Seeded checkpoints with the real names, dtypes and config keys, from a megabyte to full size.

Codes are uniform, block scales log-normal around the value that gives weights a sigma of 0.02, a few of them zero. All
bytes are slices of a few pools at offsets no two tensors share, so a layer of 4 GB is written as fast as the disk can.
"""

from __future__ import annotations

from hybrid_pack.synthetic.pools import SIGMA
from hybrid_pack.synthetic.spec import Spec, bit_map
from hybrid_pack.synthetic.writer import read_tensor, write_checkpoint

__all__ = ["SIGMA", "Spec", "bit_map", "read_tensor", "write_checkpoint"]

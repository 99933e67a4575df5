"""Slow, obvious decoders that import nothing of the package and nothing of b12x: numpy and plain Python only.

They are the second opinion every fast kernel is compared with, so they are written from the format's definition:
bit by bit, position by position. Use them on small shapes.

- ``floats``: what a 4-bit or 8-bit code means.
- ``source``: rows as a checkpoint stores them, and the weights they mean.
- ``packed``: tensors as a pack stores them, and the weights they mean.
- ``quantize``: the least error any scale gives.
- ``moe``: the mixture-of-experts product in float64.
"""

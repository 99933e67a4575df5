"""Where the bytes go: one object per device layout, with its forward, its inverse and its sizes.

Bit 0 is the least significant, byte 0 the lowest address, words are little-endian 32 bits. N is an output row, K an
input column. The forward writes rows in blocks of 64 straight from the stored bytes; its fast form is in
``pack_kernels``, the inverse in ``unpack_kernels``, and the two share no code.
"""

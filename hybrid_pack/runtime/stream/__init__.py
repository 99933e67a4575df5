"""From files to device memory: many readers, a bounded ring of pinned host buffers, copies that nobody waits for.

``plan``     which bytes are read together, and where each goes; integers only
``files``    reading them: direct or through the page cache
``digests``  hashing them on the way
``device``   what a device must offer; host memory as one
``cuda``     a CUDA device
``ring``     the host buffers
``session``  the threads that put these together
"""

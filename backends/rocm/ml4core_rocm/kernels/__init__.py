"""Triton kernels of our own and adapters of AITER, a file an op. Imported when a session opens."""

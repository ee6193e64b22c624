"""Kernels in JAX and Pallas: one source for XLA on the host, the simulator, and TPUs."""

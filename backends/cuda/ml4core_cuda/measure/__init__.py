"""Kernels checked, timed and tuned on a device: what ``python -m ml4core_cuda.check`` runs."""

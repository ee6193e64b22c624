"""What the backends of GPUs share: Triton kernels that name no vendor, and steps as graphs.

A library, and no plugin. What one architecture alone wants stays in its backend, which hands it in
as an argument: the flavour of FP8, sizes, hints.
"""

"""Kernels, one op a file. Importing one imports triton."""

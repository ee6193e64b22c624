"""Kernels in Triton, one file a contract. Imported once a session of that device opens, never
earlier: Triton decides when it decorates a function whether the interpreter runs it.
"""

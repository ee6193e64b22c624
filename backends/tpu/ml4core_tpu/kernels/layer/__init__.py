"""A decoder layer as one program, built from its ``LayerSpec``."""

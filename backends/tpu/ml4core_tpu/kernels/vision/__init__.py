"""The vision encoder as one program."""

"""Words that processes of a check say to each other."""

DEFAULTS_DONE = "defaults are compiled"

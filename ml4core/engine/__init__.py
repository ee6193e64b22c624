"""The one implementation of scheduling, caches and stepping, free of hardware."""

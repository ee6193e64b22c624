"""The checks, by subject. Each module has a function ``checks`` that lists its own."""

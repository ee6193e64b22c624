"""The version of the interface between core and plugins."""

API_VERSION = 1
"""An integer. It grows when a plugin written for the old interface could break."""

SUPPORTED_API_VERSIONS = frozenset({API_VERSION, API_VERSION - 1} - {0})
"""Core serves the current version and the one before it."""

API_KEYWORD = "ml4core-api"
"""A plugin states its range as the keyword ``ml4core-api:LOW-HIGH`` in its distribution's
metadata.
"""

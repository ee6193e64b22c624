"""What every worker process needs, imported once in the server that they are forked from."""

from __future__ import annotations

from contextlib import suppress

from ml4core_conformance import worker as worker
from ml4core_conformance.catalog import all_checks

with suppress(Exception):  # a fault of the list shows in each worker, with its reason
    all_checks()

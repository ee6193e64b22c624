"""``python -m ml4core``: the ``ml4`` command."""

import sys

from ml4core.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m openworld` is the command `openworld`."""

import sys

from openworld.cli import main

if __name__ == "__main__":
    sys.exit(main())

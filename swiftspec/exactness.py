"""`python -m swiftspec.exactness`: whether speculation changes what the target says. See lab/exactness/command.py."""

import sys

from swiftspec.lab.exactness.command import main

if __name__ == "__main__":
    sys.exit(main())

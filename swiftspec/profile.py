"""`python -m swiftspec.profile`: finds by measurement how a pair should run here. See lab/profile.py."""

import sys

from swiftspec.lab.profile import main

if __name__ == "__main__":
    sys.exit(main())

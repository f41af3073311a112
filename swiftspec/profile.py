"""`python -m swiftspec.profile`: finds by measurement how a pair should run here. See lab/profile.py."""

from swiftspec.lab.profile import main
from swiftspec.serve.__main__ import exit_process

if __name__ == "__main__":
    exit_process(main())

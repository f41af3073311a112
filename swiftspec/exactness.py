"""`python -m swiftspec.exactness`: tests whether speculation changes the output. See lab/exactness/command.py."""

from swiftspec.lab.exactness.command import main
from swiftspec.serve.__main__ import exit_process

if __name__ == "__main__":
    exit_process(main())

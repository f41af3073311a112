"""`python -m swiftspec.profile`: measures the fastest configuration of a model pair on this machine. See
lab/profile.py."""

from swiftspec.lab.profile import main
from swiftspec.serve.__main__ import exit_process

if __name__ == "__main__":
    exit_process(main())

"""``python -m graphpar``: the command line, where no script of it is on the path."""

import sys

from graphpar.cli.main import command

if __name__ == "__main__":
    sys.exit(command())

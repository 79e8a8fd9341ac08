"""``python -m overlay``: the command line, and nothing else."""

import sys

from overlay.commands import main

sys.exit(main(sys.argv[1:]))

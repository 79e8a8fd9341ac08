"""The two commands a new user runs: ``quickstart.sh`` and ``test/run.sh``.

Everything here except ``recite`` runs on the system's Python before anything is installed, so it uses the
standard library alone. ``recite`` needs numpy and runs inside the environment.

machine      what this computer has, and every reason why it cannot be enough
progress     one line that shows a long step is alive
processes    children that never outlive us
environment  the virtual environment with the fork in it, reused while nothing changed
recite       the small real model, written as BF16 and as 4-bit checkpoints of the same values
server       one `sglang serve`, from start to gone
client       prompts in, token ids and times out
report       the closing table
quickstart   the steps in order
"""

"""``launch`` is no part of the wheel: it is imported from the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

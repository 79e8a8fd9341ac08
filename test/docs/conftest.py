"""``pages``, the reader of the pages, is importable beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

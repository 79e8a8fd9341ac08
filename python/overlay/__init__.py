"""How upstream SGLang becomes sglang-lk: a pinned wheel plus a handful of anchored edits.

No upstream file lives in this repository. ``python/edits`` mirrors upstream's tree with one TOML per
edited file; this package finds the anchors, inserts the text and refuses whenever it is unsure. It
imports nothing but the standard library, so it runs inside an isolated build environment.

* ``pins``: which releases, their checksums, and our version for each (``python/upstream.toml``)
* ``wheels``: one verified wheel from a folder, the cache, or the package index
* ``edits``: the TOML files, read and written in one canonical form
* ``source``: scopes, anchors, insertion and its undoing; pure functions on text
* ``outcome``: what became of one edit in one release: ok, moved or conflict
* ``report``: the words a person reads about outcomes
* ``tree``: an edited copy of a wheel on disk, for the build and for trying things
* ``facts``: what is generated beside the pins (requirements, ``docs/reference/edits.md``)
* ``metadata``: the version and requirements of our distribution, for the build backend
* ``commands``: ``check``, ``sync``, ``accept``, ``diff``, ``tree``, ``history``

A new edit means a new ``[[edit]]`` table and ``python -m overlay accept ID``; nothing here changes.
"""

from pathlib import Path

PYTHON = Path(__file__).resolve().parent.parent
ROOT = PYTHON.parent


class OverlayError(Exception):
    """A problem that a person can solve; the text is the whole message."""

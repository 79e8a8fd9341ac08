# shellcheck shell=bash
# Sourced: sets `python` to the first Python 3.11, 3.12 or 3.13 found, or ends with the remedy.
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
python=
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c "$fits" 2> /dev/null; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  echo "No Python 3.11, 3.12 or 3.13 here: apt-get install python3.11 python3.11-venv python3.11-dev, or set PYTHON to one." >&2
  exit 1
fi

#!/usr/bin/env bash
# Makes the environment (shared with the quick start) and runs every test that needs no GPU.
#
#   ./test/run.sh [PYTEST ARGUMENTS]
#
# PYTHON=… and LK_VENV=… as for launch/quickstart.sh. A -m of yours replaces the choice of tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/python.sh
source launch/python.sh
"$python" -m launch.environment pytest hypothesis
exec "${LK_VENV:-.venv}/bin/python" -m pytest -m "not gpu" "$@"

#!/usr/bin/env bash
# Builds the fork, serves a small real model with stock SGLang and with our experts, and compares them.
#
#   ./launch/quickstart.sh
#
# PYTHON=…           the Python to use (3.11 to 3.13)
# LK_VENV=…          the environment's folder (.venv)
# QUICKSTART_PORT=…  this port and the next one (default: free ones)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/python.sh
source launch/python.sh
exec "$python" -m launch.quickstart "$@"

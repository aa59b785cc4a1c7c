#!/usr/bin/env bash
# All the set-up, then the lint and the tests. Arguments go to pytest: scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 "$@"

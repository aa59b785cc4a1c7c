#!/usr/bin/env bash
# Makes .venv with exactly what requirements.lock pins, and this checkout in it. A second call finds nothing to do.
# PYTHON=… names the interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is $("$python" --version), 3.11 or newer is needed; name one with PYTHON=…" >&2
    exit 2
}
digest=$("$python" -c 'import hashlib, pathlib
print(hashlib.sha256(b"".join(pathlib.Path(p).read_bytes() for p in ("requirements.lock", "pyproject.toml"))).hexdigest())')
if [ "$(cat .venv/installed 2>/dev/null)" != "$digest" ]; then
    echo "installing what requirements.lock pins into .venv (a few minutes the first time)"
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$digest" >.venv/installed
fi

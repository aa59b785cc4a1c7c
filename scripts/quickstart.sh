#!/usr/bin/env bash
# From nothing to a trained model: set-up, text, tokenizer, packed data, pretraining, and a check of the result by
# Hugging Face's transformers. What is finished is reused. Overrides are handed on: scripts/quickstart.sh seed=1 name=b
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
.venv/bin/python scripts/fetch_corpus.py
.venv/bin/python -m stack.train "$@"
name=laptop
for override in "$@"; do
    case $override in name=*) name=${override#name=} ;; esac
done
.venv/bin/python scripts/check_model.py "runs/$name"

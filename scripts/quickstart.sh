#!/usr/bin/env bash
# From nothing to a chat: set-up, text, tokenizer, packed data, pretraining, a check of the result by Hugging Face's
# transformers, fine-tuning, and held-out questions. What is finished is reused. Overrides are handed on to
# pretraining: scripts/quickstart.sh seed=1 name=b
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
name=laptop
for override in "$@"; do
    case $override in name=*) name=${override#name=} ;; esac
done
.venv/bin/python scripts/fetch_corpus.py
.venv/bin/python -m stack.train "$@"
.venv/bin/python scripts/check_model.py "runs/$name"
.venv/bin/python -m stack.sft base="runs/$name" name="$name-sft"
.venv/bin/python scripts/check_chat.py "runs/$name-sft"
echo
echo "talk to it: .venv/bin/python -m stack.chat checkpoint=runs/$name-sft"

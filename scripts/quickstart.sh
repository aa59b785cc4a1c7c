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
# On CPUs processes of one thread each are quicker than one process with as many threads (runs/LOG.md); the numbers are
# the same. A GPU takes one process.
start=(.venv/bin/python) ranks=()
processors=$(.venv/bin/python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
if [ "$processors" -gt 1 ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'; then
    export OMP_NUM_THREADS=$((processors > 4 ? processors / 4 : 1))
    # The address is said, because it is looked up by the name of the host otherwise, which may be known nowhere.
    start=(.venv/bin/torchrun --local-addr=127.0.0.1 --nproc-per-node=$((processors > 4 ? 4 : processors))) ranks=(parallel=ddp)
    # Under nohup torchrun would listen to SIGHUP again.
    [ -z "$(trap -p HUP)" ] || start+=(--signals-to-handle=SIGTERM,SIGINT,SIGQUIT)
fi
.venv/bin/python scripts/fetch_corpus.py
"${start[@]}" -m stack.train "${ranks[@]}" "$@"
.venv/bin/python scripts/check_model.py "runs/$name"
"${start[@]}" -m stack.sft "${ranks[@]}" base="runs/$name" name="$name-sft"
.venv/bin/python scripts/check_chat.py "runs/$name-sft"
echo
echo "talk to it: .venv/bin/python -m stack.chat checkpoint=runs/$name-sft"

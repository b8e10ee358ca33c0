#!/usr/bin/env bash
# The first run: a small hybrid learns Python's standard library over 4 context-parallel ranks, then the same
# recipe on one rank shows that the numbers are the same.
#   tools/demo.sh HCP_BINARY
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kHcp=${1:?the hcp program, build/hcp}
readonly kRecipe=recipes/demo.yaml
readonly kRun=runs/demo

step() { printf '\n== %s\n' "$*"; }

# Debian's Python before another one on the path: it is the one that setup made sure of.
python=/usr/bin/python3
[[ -x $python ]] || python=python3

step "Text: the sources of Python's standard library"
"$python" tools/demo_text.py runs/demo-text

step "Train: 4 ranks, each with a quarter of every 4,096-token sequence ($kRecipe)"
"$kHcp" train "$kRecipe" --nproc 4 checkpoint.resume=never

step "Verify: the same recipe on 4 ranks and on one, compared step by step"
"$kHcp" verify parallel "$kRecipe" --nproc 4 train.steps=10

step "Done. The loss curve: $PWD/$kRun/loss.svg (numbers: $kRun/metrics.jsonl)"

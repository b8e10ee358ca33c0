#!/usr/bin/env bash
# Training in bf16 over ranks against one rank, 200 steps of recipes/parity.yaml, in every mode and layout with sharded
# parameters: the largest relative difference of loss and of gradient norm at any step, one line a choice. Exit status 1
# if one is above 1e-3 or a run fails. About 100 s a choice on two idle cores. The text: tools/demo_text.py runs/demo-text.
#   tools/verify_parity.sh HCP_BINARY [key.path=value ...]
set -uo pipefail

readonly kHcp=${1:?the hcp program, build/hcp}
readonly kBar=1e-3
shift
# A learning rate of 1e-4: at 3e-4 the run has spikes that multiply any difference (bench/results).
readonly kOverrides=(model.dtype=bf16 train.optimizer.lr=1.0e-4 train.accelerator.linear_attention_gdn_backend=fused
  train.accelerator.fsdp=true "$@")

report=$(mktemp)
trap 'rm -f "$report"' EXIT
failed=0

# verify RANKS KEY=VALUE...: keys of train.accelerator.
verify() {
  local ranks=$1 output
  shift
  local keys=("${@/#/train.accelerator.}")
  if ! output=$("$kHcp" verify parallel recipes/parity.yaml --nproc "$ranks" --report "$report" "${kOverrides[@]}" "${keys[@]}" 2>&1) &&
    [[ ! -s $report ]]; then
    failed=$((failed + 1))
    printf 'FAIL  %s\n%s\n' "$*" "$(tail -n 3 <<<"$output")"
    return
  fi
  python3 - "$report" "$kBar" "$*" <<'PYTHON' || failed=$((failed + 1))
import json, sys
path, bar, label = sys.argv[1:]
errors = {row["tensor"]: row["error"] for row in json.load(open(path))["reports"][0]["rows"]}
passed = all(error <= float(bar) for error in errors.values())
print("ok   " if passed else "FAIL ", *(f"{name} {error:.1e}" for name, error in errors.items()), label, flush=True)
sys.exit(not passed)
PYTHON
  : >"$report"
}

for mode in ulysses p2p all_gather scan gather_hidden; do
  verify 4 linear_attention_cp_mode=$mode full_attention_cp_mode=all_gather sequence_layout=contiguous
  verify 4 linear_attention_cp_mode=$mode full_attention_cp_mode=ring sequence_layout=zigzag
  verify 4 linear_attention_cp_mode=$mode full_attention_cp_mode=ulysses sequence_layout=folded
done
for mode in p2p scan; do
  verify 4 linear_attention_cp_mode=$mode full_attention_cp_mode=ring sequence_layout=zigzag linear_attention_layout=convert
done
verify 4 dp=2 cp=2 linear_attention_cp_mode=p2p full_attention_cp_mode=ring sequence_layout=zigzag
verify 8 cp=8 linear_attention_cp_mode=p2p full_attention_cp_mode=ring sequence_layout=zigzag layout_cut=row
exit $((failed > 0))

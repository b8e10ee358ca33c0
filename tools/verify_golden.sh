#!/usr/bin/env bash
# Every golden file that this build can check: operators (reference, eager and fused, fp32 and bf16), models on 1, 2, 3, 4, 5
# and 8 ranks in every mode and every layout, the trajectories, and these with sharded parameters. One line a command; exit status 1 if any fails.
# BACKEND=fused runs the models and trajectories with it (eager by default).
#   tools/verify_golden.sh HCP_BINARY GOLDEN_FOLDER [ops|models|layouts|trajectories|sharding ...]
set -uo pipefail

readonly kHcp=${1:?the hcp program, build/hcp}
readonly kGolden=${2:?the golden folder, tests/golden}
readonly kBackend=train.accelerator.linear_attention_gdn_backend=${BACKEND:-eager}
shift 2
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(ops models layouts trajectories sharding)

failed=0
total=0

# expect STATUS LABEL COMMAND...: the command's exit status must be STATUS; its last line is shown.
expect() {
  local wanted=$1 label=$2 output status
  shift 2
  output=$("$@" 2>&1)
  status=$?
  total=$((total + 1))
  if [[ $status -eq $wanted ]]; then
    printf 'ok    %s: %s\n' "$label" "$(tail -n 1 <<<"$output")"
  else
    failed=$((failed + 1))
    printf 'FAIL  %s (status %d, wanted %d)\n%s\n' "$label" "$status" "$wanted" "$output"
  fi
}

verify_ops() {
  local folder op
  for folder in "$kGolden"/ops/*/; do
    op=$(basename "$folder")
    expect 0 "op $op reference" "$kHcp" verify op "$op" "$folder"*.safetensors --backend reference
    expect 0 "op $op eager fp32" "$kHcp" verify op "$op" "$folder"*.safetensors
    expect 0 "op $op fused fp32" "$kHcp" verify op "$op" "$folder"*.safetensors --backend fused
    case $op in  # the operators that have bars in bf16
    gdn | conv1d | gated_rmsnorm | rmsnorm_zero_centered)
      expect 0 "op $op eager bf16" "$kHcp" verify op "$op" "$folder"*.safetensors --dtype bf16
      expect 0 "op $op fused bf16" "$kHcp" verify op "$op" "$folder"*.safetensors --dtype bf16 --backend fused
      ;;
    esac
  done
}

# json_field FILE KEY: a number of config.json, flat or under text_config.
json_field() {
  python3 -c 'import json, sys
config = json.load(open(sys.argv[1]))
print(config.get("text_config", config)[sys.argv[2]])' "$1" "$2"
}

verify_model_case() {
  local model=$1 batch=$2 name ranks mode full wanted
  name="$(basename "$model")/$(basename "$(dirname "$batch")")"
  local query_heads value_heads
  query_heads=$(json_field "$model/config.json" num_attention_heads)
  value_heads=$(json_field "$model/config.json" linear_num_value_heads)
  local case=("$kHcp" verify model "$model" --batch "$batch" --expected "${batch%batch.safetensors}expected.safetensors"
    "$kBackend")
  expect 0 "$name 1 rank" "${case[@]}"
  for ranks in 2 3 4 5 8; do
    for mode in p2p all_gather ulysses; do
      for full in all_gather ring ulysses; do
        wanted=0  # ulysses where heads divide; elsewhere it refuses
        [[ $mode == ulysses && $((value_heads % ranks)) -ne 0 ]] && wanted=2
        [[ $full == ulysses && $((query_heads % ranks)) -ne 0 ]] && wanted=2
        expect $wanted "$name $ranks ranks, linear $mode, full $full" "${case[@]}" --nproc $ranks --against-one-rank \
          train.accelerator.linear_attention_cp_mode=$mode train.accelerator.full_attention_cp_mode=$full
      done
    done
  done
}

verify_models() {
  local model batch cases
  for model in "$kGolden"/models/*/; do
    cases=${model%/}
    cases=${cases%_per_expert}  # the same model in another form, without cases of its own
    for batch in "$cases"/*/batch.safetensors; do
      verify_model_case "${model%/}" "$batch"
    done
  done
}

# Every linear mode in every layout, native and converted, packed and not, on every number of ranks; the modes of full
# attention take turns. Layout cut by row on every second one.
verify_layouts() {
  local model batch name ranks mode way turn=0 wanted full cut
  local fulls=(ring all_gather)
  for model in dense_tiny moe_tiny dense_tiny8; do
    [[ -d $kGolden/models/$model ]] || continue
    for batch in "$kGolden/models/$model"/*/batch.safetensors; do
      name="$model/$(basename "$(dirname "$batch")")"
      for ranks in 2 3 4 5 8; do
        for mode in p2p all_gather scan ulysses gather_hidden; do
          for way in zigzag:native zigzag:folded zigzag:contiguous folded:native folded:contiguous contiguous:folded; do
            [[ $mode == gather_hidden && $way != *:native ]] && continue
            turn=$((turn + 1))
            full=${fulls[turn % 2]}
            cut=document
            [[ $((turn / 2 % 2)) -eq 1 ]] && cut=row
            wanted=0
            [[ $mode == ulysses && $(($(json_field "$kGolden/models/$model/config.json" linear_num_value_heads) % ranks)) -ne 0 ]] &&
              wanted=2
            local words=("$kBackend" train.accelerator.sequence_layout="${way%:*}" train.accelerator.layout_cut=$cut)
            [[ $way != *:native ]] &&
              words+=(train.accelerator.linear_attention_layout=convert train.accelerator.convert_to="${way#*:}")
            expect $wanted "$name $ranks ranks, $mode, $way by $cut, full $full" "$kHcp" verify model \
              "$kGolden/models/$model" --batch "$batch" --expected "${batch%batch.safetensors}expected.safetensors" \
              --nproc $ranks train.accelerator.linear_attention_cp_mode=$mode \
              train.accelerator.full_attention_cp_mode=$full "${words[@]}"
          done
        done
      done
    done
  done
}

verify_trajectories() {
  local folder name run
  local modes=(train.accelerator.linear_attention_cp_mode=p2p train.accelerator.full_attention_cp_mode=all_gather)
  for folder in "$kGolden"/trajectories/*/; do
    name=$(basename "$folder")
    run=("$kHcp" verify trajectory "${folder%/}" --model "$kGolden/models/$name" "$kBackend")
    expect 0 "trajectory $name 1 rank" "${run[@]}"
    expect 0 "trajectory $name cp 4" "${run[@]}" --nproc 4 train.accelerator.cp=4 "${modes[@]}"
    expect 0 "trajectory $name cp 4, ulysses" "${run[@]}" --nproc 4 train.accelerator.cp=4
    expect 0 "trajectory $name dp 2 x cp 2" "${run[@]}" --nproc 4 train.accelerator.dp=2 train.accelerator.cp=2 \
      "${modes[@]}"
    expect 0 "trajectory $name cp 8, zigzag, converted, ring" "${run[@]}" --nproc 8 train.accelerator.cp=8 \
      train.accelerator.linear_attention_cp_mode=p2p train.accelerator.full_attention_cp_mode=ring \
      train.accelerator.sequence_layout=zigzag train.accelerator.linear_attention_layout=convert
    expect 0 "trajectory $name cp 2, zigzag, scan, ring" "${run[@]}" --nproc 2 train.accelerator.cp=2 \
      train.accelerator.linear_attention_cp_mode=scan train.accelerator.full_attention_cp_mode=ring \
      train.accelerator.sequence_layout=zigzag
  done
}

# Each recorded run on meshes (dp x cp) with whole and with sharded parameters, and recomputed activations.
verify_sharding() {
  local folder name mesh dp cp run extra
  for folder in "$kGolden"/trajectories/*/; do
    name=$(basename "$folder")
    for mesh in 1:4 2:2 1:8 1:3; do
      dp=${mesh%:*} cp=${mesh#*:}
      run=("$kHcp" verify trajectory "${folder%/}" --model "$kGolden/models/$name" "$kBackend" --nproc $((dp * cp))
        train.accelerator.dp="$dp" train.accelerator.cp="$cp" train.accelerator.linear_attention_cp_mode=p2p
        train.accelerator.full_attention_cp_mode=ring train.accelerator.sequence_layout=zigzag)
      for extra in fsdp=false fsdp=true "fsdp=true fsdp_prefetch=false" "fsdp=true fsdp_shard_size=$cp"; do
        # shellcheck disable=SC2086
        expect 0 "trajectory $name dp $dp x cp $cp, $extra" "${run[@]}" $(printf 'train.accelerator.%s ' $extra)
      done
      expect 0 "trajectory $name dp $dp x cp $cp, sharded, recomputed" "${run[@]}" train.accelerator.fsdp=true \
        train.activation_checkpoint=full
    done
  done
}

for part in "${parts[@]}"; do
  "verify_$part"
done
printf '%d of %d commands ended as they should\n' $((total - failed)) "$total"
[[ $failed -eq 0 ]]

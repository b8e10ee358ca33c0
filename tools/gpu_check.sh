#!/usr/bin/env bash
# On a machine with CUDA, libtorch (a Python torch of the pinned version) and at least one GPU: builds with HCP_CUDA=ON,
# checks the operators and a model on the GPU, over NCCL where there are two GPUs, and prints a short table last.
#   tools/gpu_check.sh PREFIX GOLDEN_FOLDER OUTPUT_FOLDER
# PREFIX holds what such a machine may lack: headers and CMake packages of yaml-cpp, CLI11, nlohmann-json, fmt, gloo and xxHash.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kPrefix=${1:?a prefix with yaml-cpp, CLI11, nlohmann-json, fmt and gloo}
readonly kGolden=${2:?the golden folder}
readonly kOut=${3:?where logs go}
readonly kBuild=build-cuda

torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
site=$(dirname "$torch")
includes="-isystem $kPrefix/include -isystem /usr/local/cuda/include"
for folder in "$site"/nvidia/*/include; do includes+=" -isystem $folder"; done
libraries="$kPrefix/lib/x86_64-linux-gnu:$torch/lib:/usr/local/cuda/lib64"
for folder in "$site"/nvidia/*/lib; do libraries+=":$folder"; done
export LD_LIBRARY_PATH=$libraries

seconds() { date +%s; }
start=$(seconds)
mkdir -p "$kOut"
HCP_LIBTORCH=$torch cmake -G Ninja -B "$kBuild" -DHCP_CUDA=ON -DHCP_TESTS=OFF -DCMAKE_PREFIX_PATH="$kPrefix" \
  -DCMAKE_CXX_FLAGS="$includes" -DHCP_GLOO_INCLUDE="$kPrefix/include" >"$kOut/configure.txt" 2>&1 ||
  { tail -n 20 "$kOut/configure.txt"; exit 1; }
ninja -C "$kBuild" hcp >"$kOut/build.txt" 2>&1 || { grep -E 'error|undefined' "$kOut/build.txt" | head -n 20; exit 1; }
printf 'built in %d s\n' $(($(seconds) - start))

readonly kHcp=$PWD/$kBuild/hcp
table=()
failed=0

# check LABEL COMMAND...: keeps the command's last line for the table.
check() {
  local label=$1 log status
  shift
  log=$kOut/$(tr -c 'a-z0-9\n' '_' <<<"$label").txt
  timeout 120 "$@" >"$log" 2>&1
  status=$?
  [[ $status -eq 0 ]] || failed=$((failed + 1))
  table+=("$([[ $status -eq 0 ]] && echo ok || echo "FAIL $status")  $label: $(tail -n 1 "$log")")
}

check version "$kHcp" version
for op in gdn conv1d gated_attention gated_rmsnorm rmsnorm_zero_centered rope_partial swiglu_mlp cross_entropy gdn_gate moe; do
  check "op $op" "$kHcp" verify op "$op" "$kGolden/ops/$op"/*.safetensors --device cuda
done
model=$kGolden/models/dense_tiny
gpus=$(nvidia-smi -L | wc -l)
for ranks in 1 2; do
  [[ $ranks -le $gpus ]] || continue
  for mode in p2p all_gather ulysses; do
    for full in all_gather ring ulysses; do
      check "model $ranks gpus linear $mode full $full" "$kHcp" verify model "$model" \
        --batch "$model/packed/batch.safetensors" --expected "$model/packed/expected.safetensors" --nproc $ranks \
        train.accelerator.device=cuda train.accelerator.linear_attention_cp_mode=$mode \
        train.accelerator.full_attention_cp_mode=$full
    done
  done
done
# Layouts: the chain of a document comes back to each rank in zigzag, so both ranks send and receive on one pair.
for name in dense_tiny moe_tiny; do
  model=$kGolden/models/$name
  [[ $gpus -ge 2 && -d $model ]] || continue
  for mode in p2p all_gather scan ulysses gather_hidden; do
    for way in zigzag:native zigzag:folded zigzag:contiguous folded:native; do
      words=(train.accelerator.sequence_layout="${way%:*}")
      [[ $way == *:native ]] ||
        words+=(train.accelerator.linear_attention_layout=convert train.accelerator.convert_to="${way#*:}")
      check "$name 2 gpus $mode $way" "$kHcp" verify model "$model" --batch "$model/packed/batch.safetensors" \
        --expected "$model/packed/expected.safetensors" --nproc 2 train.accelerator.device=cuda \
        train.accelerator.linear_attention_cp_mode=$mode train.accelerator.full_attention_cp_mode=ring "${words[@]}"
    done
  done
done
printf '%s\n' "${table[@]}"
printf 'gpu check: %d of %d failed, %d s\n' $failed ${#table[@]} $(($(seconds) - start))
[[ $failed -eq 0 ]]

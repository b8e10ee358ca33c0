#!/usr/bin/env bash
# On a machine with CUDA, libtorch (a Python torch of the pinned version) and at least one GPU: builds with HCP_CUDA=ON,
# checks the operators, the Gated DeltaNet kernels (also under compute-sanitizer) and models on the GPU, over NCCL where
# there are two GPUs, times Gated DeltaNet, and prints a short table last.
#   tools/gpu_check.sh PREFIX GOLDEN_FOLDER OUTPUT_FOLDER [PART...]      parts: ops kernels sanitizer models bench (all)
# PREFIX holds what such a machine may lack: headers and CMake packages of yaml-cpp, CLI11, nlohmann-json, fmt, GoogleTest,
# gloo and xxHash (tools/gpu_prefix.sh collects them).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kPrefix=${1:?a prefix with yaml-cpp, CLI11, nlohmann-json, fmt and gloo}
readonly kGolden=${2:?the golden folder}
readonly kOut=${3:?where logs go}
shift 3
readonly kParts=" ${*:-ops kernels sanitizer models bench} "
readonly kBuild=build-cuda

torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
site=$(dirname "$torch")
includes="-isystem $kPrefix/include -isystem /usr/local/cuda/include"
for folder in "$site"/nvidia/*/include; do includes+=" -isystem $folder"; done
libraries="$kPrefix/lib/x86_64-linux-gnu:$torch/lib:/usr/local/cuda/lib64"
for folder in "$site"/nvidia/*/lib; do libraries+=":$folder"; done
export LD_LIBRARY_PATH=$libraries OMP_NUM_THREADS=1

seconds() { date +%s; }
start=$(seconds)
mkdir -p "$kOut"
HCP_LIBTORCH=$torch cmake -G Ninja -B "$kBuild" -DHCP_CUDA=ON -DCMAKE_PREFIX_PATH="$kPrefix" \
  -DCMAKE_CXX_FLAGS="$includes" -DHCP_GLOO_INCLUDE="$kPrefix/include" -DHCP_XXHASH_INCLUDE="$kPrefix/include" >"$kOut/configure.txt" 2>&1 ||
  { tail -n 20 "$kOut/configure.txt"; exit 1; }
# Racecheck cannot judge the kernels as they are: it gets a build of its own (docs/gdn-cuda.md, "Racecheck").
build_for_racecheck() {
  local nvcc=(nvcc -O3 -std=c++20 --expt-relaxed-constexpr -lineinfo -I src -cudart static
    --generate-code=arch=compute_90a,code=sm_90a -DHCP_RACECHECK) folder=$kBuild/racecheck pids=() i
  mkdir -p "$folder"
  for i in bf16 fp16; do
    "${nvcc[@]}" -DHCP_OPERANDS=$i -c -o "$folder/$i.o" src/kernels/gdn/cuda/launch.cu &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || return 1; done
  "${nvcc[@]}" -o "$folder/kernels" bench/gdn_cuda_kernels.cu "$folder"/{bf16,fp16}.o \
    src/kernels/gdn/cuda/{host_tables,device_traits}.cpp
}
if [[ $kParts == *" sanitizer "* ]]; then
  build_for_racecheck >"$kOut/build_for_racecheck.txt" 2>&1 &
  racecheck_build=$!
fi
ninja -C "$kBuild" hcp gdn_device_test >"$kOut/build.txt" 2>&1 || { grep -E 'error|undefined' "$kOut/build.txt" | head -n 20; exit 1; }
if [[ -n ${racecheck_build:-} ]]; then
  wait "$racecheck_build" || { grep error "$kOut/build_for_racecheck.txt" | head -n 20; exit 1; }
fi
printf 'built in %d s\n' $(($(seconds) - start))

readonly kHcp=$PWD/$kBuild/hcp
readonly kDeviceTest=$PWD/$kBuild/tests/gdn_cuda/gdn_device_test
wants() { [[ $kParts == *" $1 "* ]]; }
table=()
failed=0

log_of() { echo "$kOut/$(tr -c 'a-z0-9\n' '_' <<<"$1").txt"; }
# note STATUS LABEL: keeps the last line of the command's log for the table.
note() {
  [[ $1 -eq 0 ]] || failed=$((failed + 1))
  table+=("$([[ $1 -eq 0 ]] && echo ok || echo "FAIL $1")  $2: $(tail -n 1 "$(log_of "$2")")")
}
# check LABEL COMMAND...
check() {
  local label=$1
  shift
  timeout 150 "$@" >"$(log_of "$label")" 2>&1
  note $? "$label"
}
# start LABEL COMMAND...: beside what follows, until finish. For what is not timed and mostly waits for its reference.
started=() labels=()
start() {
  labels+=("$1")
  timeout 300 "${@:2}" >"$(log_of "$1")" 2>&1 &
  started+=($!)
}
finish() {
  local i
  for i in "${!started[@]}"; do
    wait "${started[i]}"
    note $? "${labels[i]}"
  done
  started=() labels=()
}

# shards LABEL N FILTER: the tests of FILTER in N processes at once.
shards() {
  local label=$1 count=$2 filter=$3 pids=() bad=0 i
  for ((i = 0; i < count; i++)); do
    GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i timeout 200 "$kDeviceTest" --gtest_filter="$filter" \
      >"$kOut/device_test_$i.txt" 2>&1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || bad=$((bad + 1)); done
  [[ $bad -eq 0 ]] || failed=$((failed + 1))
  table+=("$([[ $bad -eq 0 ]] && echo ok || echo FAIL)  $label: $bad of $count processes failed")
}

check version "$kHcp" version
if wants ops; then
  for op in gdn conv1d gated_attention gated_rmsnorm rmsnorm_zero_centered rope_partial swiglu_mlp cross_entropy gdn_gate moe; do
    check "op $op" "$kHcp" verify op "$op" "$kGolden/ops/$op"/*.safetensors --device cuda
  done
  check "op gdn fused" "$kHcp" verify op gdn "$kGolden"/ops/gdn/*.safetensors --device cuda --backend fused --dtype bf16
fi
if wants kernels; then
  for tokens in 8K 32K 128K; do
    start "gdn on a gpu $tokens" "$kDeviceTest" --gtest_filter="GdnOnGpuLong.Tokens$tokens"
  done
  shards 'generated cases' 14 '*GeneratedCases*'
  for suite in Exact Summaries Refusals; do
    check "gdn on a gpu $suite" "$kDeviceTest" --gtest_filter="GdnOnGpu$suite.*"
  done
fi
if wants sanitizer; then
  check "sanitizer memcheck" compute-sanitizer --tool memcheck --error-exitcode 1 "$kDeviceTest" \
    --gtest_filter='GdnOnGpuExact.StridesPaddingAndStreams:GdnOnGpuSummaries.OfParts'
  for type in bf16 fp16; do
    check "sanitizer racecheck $type" compute-sanitizer --tool racecheck --error-exitcode 1 "$kBuild/racecheck/kernels" \
      2 4 300 ls16 1 none $type 0.4
  done
fi
model=$kGolden/models/dense_tiny
gpus=$(nvidia-smi -L | wc -l)
for ranks in 1 2; do
  [[ $ranks -le $gpus ]] && wants models || continue
  for mode in p2p all_gather ulysses; do
    for full in all_gather ring ulysses; do
      check "model $ranks gpus linear $mode full $full" "$kHcp" verify model "$model" \
        --batch "$model/packed/batch.safetensors" --expected "$model/packed/expected.safetensors" --nproc $ranks \
        train.accelerator.device=cuda train.accelerator.linear_attention_cp_mode=$mode \
        train.accelerator.full_attention_cp_mode=$full
    done
  done
done
# Training with the fused kernels: one rank learns, and two are one.
if wants models; then
  python3 tools/demo_text.py runs/demo-text
  words=(recipes/parity.yaml model.dtype=bf16 train.steps=20 train.optimizer.lr=1e-4 train.accelerator.device=cuda
    train.accelerator.linear_attention_gdn_backend=fused)
  check "train fused 1 gpu" "$kHcp" train "${words[@]}" --nproc 1 train.accelerator.cp=1
  [[ $gpus -lt 2 ]] || check "verify parallel fused 2 gpus" "$kHcp" verify parallel "${words[@]}" --nproc 2 train.accelerator.cp=2
fi
# Layouts: the chain of a document comes back to each rank in zigzag, so both ranks send and receive on one pair.
for name in dense_tiny moe_tiny; do
  model=$kGolden/models/$name
  [[ $gpus -ge 2 && -d $model ]] && wants models || continue
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
finish
if wants bench; then
  for shape in '16 32 8192,32768 ls16' '16 32 32768 zero25' '16 32 32768 qwen' '16 64 32768 ls16' '16 16 32768 ls16' \
    '2 8 32768 ls16' '4 8 32768 ls16'; do
    read -r keys values tokens gates <<<"$shape"
    "$kHcp" bench gdn --device cuda --dtype bf16 --backend fused --key-heads "$keys" --value-heads "$values" \
      --tokens "$tokens" --gates "$gates" --kept-share 0,0.4 --report "$kOut/bench_${keys}_${values}_$gates.json" 2>&1 |
      tail -n +2
  done
  for gates in ls16 zero25; do
    "$kHcp" bench gdn --device cuda --dtype bf16 --backend fused --key-heads 16 --value-heads 32 --tokens 16384 \
      --gates "$gates" --kept-share 0 --pass forward,backward,summary,gradient_summary 2>&1 | tail -n +2
  done
  "$kHcp" bench gdn --device cuda --dtype bf16 --backend fused --key-heads 16 --value-heads 32 --tokens 8192,16384 \
    --peer hf --peer-repeats 3 --report "$kOut/bench_hf.json" 2>&1 | grep ' hf '
fi
printf '%s\n' "${table[@]}"
printf 'gpu check: %d of %d failed, %d s\n' $failed ${#table[@]} $(($(seconds) - start))
[[ $failed -eq 0 ]]

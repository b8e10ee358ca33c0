#!/usr/bin/env bash
# Installs what is missing and nothing else: Debian packages with apt-get, libtorch and the lint tools from PyPI
# into .deps/python. Quick when nothing is missing. A failure ends with one line that says what and how to get it.
#   tools/setup.sh build   what 'make build', 'make test' and 'make demo' need
#   tools/setup.sh lint    that, clang-format and clang-tidy, and nvcc where there is none
# HCP_LIBTORCH=DIR   use the libtorch in DIR (it holds include/ and lib/) instead of installing one
# HCP_SKIP_APT=1     leave packages alone: the tools and headers come from elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kPackages=(g++ cmake ninja-build ccache git ca-certificates python3 python3-venv libyaml-cpp-dev
    libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev libgmock-dev libgloo-dev libxxhash-dev)
readonly kVenv=.deps/python
readonly kLog=.deps/setup.log
readonly kTorchMegabytes=2000  # the wheel, and what it unpacks to

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# The reason of a failed install, from its log, in a few words.
reason_in_log() {
    if grep -qiE 'no space left|not enough free space|enospc' "$kLog"; then
        echo "the disk (or \$TMPDIR) is full; free some 3 GB and run make again"
    elif grep -qiE 'could not resolve|failure resolving|name resolution|could not connect|connection refused' \
        "$kLog" || grep -qiE 'network is unreachable|timed out|proxyerror|sslerror|failed to fetch' "$kLog"; then
        echo "the network or its proxy does not answer; check it and run make again"
    elif grep -qiE 'could not get lock|unable to acquire' "$kLog"; then
        echo "another apt-get is running; wait for it and run make again"
    elif grep -qiE 'password is required|not in the sudoers|not allowed to execute' "$kLog"; then
        echo "sudo was refused; as root run: apt-get install -y ${*}"
    else
        grep -vE '^\s*$' "$kLog" | tail -n 1
    fi
}

require_free_space() {  # directory, megabytes, what for
    local free_megabytes
    free_megabytes=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
    if ((free_megabytes < $2)); then
        fail "$3 needs $2 MB in $(cd "$1" && pwd) and $free_megabytes MB are free; make room and run make again"
    fi
}

missing_packages() {
    local installed package
    installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "${kPackages[@]}" 2>/dev/null || true)
    for package in "${kPackages[@]}"; do
        grep -qxF "$package installed" <<<"$installed" || echo "$package"
    done
}

install_packages() {
    local missing as_root=()
    if [[ ${HCP_SKIP_APT:-} == 1 ]]; then
        return
    fi
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        fail "no apt-get here (Debian 12 and Ubuntu 24.04 have it): install the equivalents of ${kPackages[*]}," \
            "then run make again with HCP_SKIP_APT=1"
    fi
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]} == 0)); then
        return
    fi
    if ((EUID != 0)); then
        command -v sudo >/dev/null || fail "not root, and there is no sudo: as root run: apt-get install -y ${missing[*]}"
        as_root=(sudo)
        sudo -v || fail "sudo was refused: as root run: apt-get install -y ${missing[*]}"
    fi
    say "installing Debian packages: ${missing[*]}"
    # A stale list of one foreign source need not matter: whether the install works is what counts.
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
    "${apt[@]}" update >"$kLog" 2>&1 || true
    if ! "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >>"$kLog" 2>&1; then
        fail "apt-get could not install these packages: $(reason_in_log "${missing[@]}") (log: $kLog)"
    fi
}

# Whether the venv holds what a requirements file pins. pip writes INSTALLER last.
installed() {
    local line name version
    while read -r line; do
        name=${line%%==*} version=${line#*==}
        compgen -G "$kVenv/lib/python3*/site-packages/${name//-/_}-$version.dist-info/INSTALLER" >/dev/null || return 1
    done < <(grep -E '^[a-z]' "$1")
}

install_wheels() {  # requirements file, what it is
    if installed "$1"; then
        return
    fi
    if [[ ! -x $kVenv/bin/python ]] || ! "$kVenv/bin/python" -m pip --version >/dev/null 2>&1; then
        # Debian's own python3 first: its venv module is the one that was just installed.
        local python=/usr/bin/python3
        [[ -x $python ]] || python=$(command -v python3) || fail "no python3: install python3 and python3-venv"
        "$python" -m venv --clear "$kVenv" >"$kLog" 2>&1 ||
            fail "python3 could not make a virtual environment in $kVenv: $(reason_in_log) (log: $kLog)"
    fi
    say "installing $2 into $kVenv: $(grep -E '^[a-z]' "$1" | xargs)"
    if ! "$kVenv/bin/python" -m pip install --disable-pip-version-check --no-deps -r "$1" >"$kLog" 2>&1; then
        fail "pip could not install $2: $(reason_in_log) (log: $kLog)"
    fi
}

check_given_libtorch() {
    local pin header version
    pin=$(sed -n 's/^torch==//p' tools/requirements.txt)
    [[ -d $HCP_LIBTORCH/include/ATen && -e $HCP_LIBTORCH/lib/libtorch_cpu.so ]] ||
        fail "HCP_LIBTORCH=$HCP_LIBTORCH has no include/ATen or lib/libtorch_cpu.so: name torch's folder, or unset it"
    header=$HCP_LIBTORCH/include/torch/headeronly/version.h
    version=$(sed -n '/define TORCH_VERSION /,/"/s/.*"\(.*\)".*/\1/p' "$header" 2>/dev/null || true)
    [[ $version == "$pin" ]] ||
        fail "HCP_LIBTORCH=$HCP_LIBTORCH holds torch ${version:-of an unknown version}, $pin is needed: unset it to install that"
}

profile=${1:-build}
[[ $profile == build || $profile == lint ]] || fail "unknown profile '$profile': build or lint"
mkdir -p .deps 2>/dev/null || fail "cannot write to $PWD: clone into a folder of your own"
install_packages
if [[ -n ${HCP_LIBTORCH:-} ]]; then
    check_given_libtorch
elif ! installed tools/requirements.txt; then
    require_free_space .deps "$kTorchMegabytes" "libtorch"
    install_wheels tools/requirements.txt "libtorch"
fi
if [[ $profile == lint ]]; then
    install_wheels tools/requirements-lint.txt "the lint tools"
    if ! command -v nvcc >/dev/null && [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
        install_wheels tools/requirements-cuda.txt "nvcc"
    fi
fi

#!/usr/bin/env bash
# Collects the headers, libraries and CMake packages that tools/gpu_check.sh takes as PREFIX from this machine's Debian
# packages (tools/setup.sh build installs them), for a GPU machine that has neither them nor a network.
#   tools/gpu_prefix.sh FOLDER      some 8 MB; copy it to the GPU machine
set -euo pipefail

readonly kFolder=${1:?the folder to write, which must not exist}
readonly kPackages=(libyaml-cpp-dev libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev libgmock-dev libgloo-dev
  libxxhash-dev)

fail() {
  printf 'gpu_prefix: %s\n' "$*" >&2
  exit 2
}

[[ ! -e $kFolder ]] || fail "$kFolder is there already; name a new folder"
for package in "${kPackages[@]}"; do
  dpkg-query -L "$package" >/dev/null 2>&1 || fail "$package is not installed; run tools/setup.sh build"
done
# The shared libraries of some are packages of their own: libfmt9, libyaml-cpp0.7.
mapfile -t libraries < <(dpkg-query -W -f='${Depends}, ' "${kPackages[@]}" | tr ',' '\n' |
  grep -oE '^ *lib(fmt|yaml-cpp)[0-9.]+' | tr -d ' ')
partial=$kFolder.partial
rm -rf "$partial"
mkdir -p "$partial"
dpkg-query -L "${kPackages[@]}" "${libraries[@]}" | grep -E '^/usr/(include|lib|share/(cmake|pkgconfig|nlohmann))' | sort -u |
  while read -r file; do
    [[ -d $file && ! -L $file ]] || cp --parents -d "$file" "$partial"
  done
mv "$partial/usr" "$kFolder"
rmdir "$partial"
printf 'gpu_prefix: %s in %s\n' "$(du -sh "$kFolder" | cut -f1)" "$kFolder"

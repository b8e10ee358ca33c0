#!/usr/bin/env bash
# Checks format, sizes, characters, folder names and layers of tracked files, then clang-tidy; fails at the end.
#   tools/lint.sh BUILD_FOLDER [--full]
# clang-tidy takes some 30 s for a file that includes libtorch, so it reads those with --full only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export LC_ALL=C

readonly kBuild=${1:?the build folder, for its compile_commands.json}
readonly kScope=${2:-fast}
readonly kTools=.deps/python/bin
readonly kHeaderLines=150 kSourceLines=350 kSourceLinesMost=500 kReadmeLines=150
failed=0

complain() {
    printf 'lint: %s\n' "$*"
    failed=1
}

check_format() {
    git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs "$kTools/clang-format" --dry-run -Werror ||
        complain "format: run $kTools/clang-format -i on the files above"
}

check_lengths() {
    local lines file
    while read -r lines file; do
        case $file in
        total) ;;
        # A kernel lives in .cuh files, which nvcc and the emulator include: they count as sources.
        *.h) ((lines <= kHeaderLines)) || complain "$file: $lines lines, a header has at most $kHeaderLines" ;;
        README.md) ((lines <= kReadmeLines)) || complain "$file: $lines lines, at most $kReadmeLines" ;;
        *)
            if ((lines > kSourceLinesMost)); then
                complain "$file: $lines lines, at most $kSourceLinesMost"
            elif ((lines > kSourceLines)); then
                printf 'lint: warning: %s: %s lines, more than %s\n' "$file" "$lines" "$kSourceLines"
            fi
            ;;
        esac
    done < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.py' '*.sh' README.md | xargs wc -l)
}

check_text() {
    ! git grep -nI '[^[:space:] -~]' -- . || complain "characters that are not ASCII, in the lines above"
    ! git ls-files | grep -E '(^|/)(utils|misc|common|legacy)/' ||
        complain "folder names that say nothing, above: name what the files do"
}

check_layers() {
    python3 tools/check_layers.py || complain "layers: in the lines above a folder includes one it does not link"
}

# Files of the build, one a line; those compiled with the precompiled header include libtorch.
tidy_files() {
    awk -v root="$PWD/" -v scope="$kScope" -F '"' '
        $2 == "command" { libtorch = /cmake_pch/ }
        $2 == "file" && index($4, root) == 1 && $4 !~ /\/cmake_pch/ && (!libtorch || scope == "--full") {
            print substr($4, length(root) + 1) }' "$kBuild/compile_commands.json" | sort -u
}

# A file that is compiled once per instruction set is read once, as its first command says.
first_commands() {
    python3 -c 'import json, sys
first = {}
for command in json.load(open(sys.argv[1])):
    first.setdefault(command["file"], command)
json.dump(list(first.values()), sys.stdout)' "$kBuild/compile_commands.json"
}

check_tidy() {
    mkdir -p "$kBuild/lint"
    first_commands > "$kBuild/lint/compile_commands.json"
    tidy_files | xargs -P "$(nproc)" -n 1 "$kTools/clang-tidy" -p "$kBuild/lint" --quiet \
        2> >(grep -v 'warnings\? generated' >&2) ||
        complain "clang-tidy: see the lines above"
}

check_format
check_lengths
check_text
check_layers
check_tidy
((failed == 0)) && echo "lint: nothing to complain about"
exit "$failed"

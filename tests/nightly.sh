#!/usr/bin/env bash
# run.sh and what takes too long for it, one after another, for hours. Each command says at its head what it
# does. What fails does not stop the others, and is named at the end.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failed=()
attempt() { echo "== $*"; "$@" || failed+=("$*"); }
# Ray's tests, which take two minutes, run with run.sh's once it is there.
attempt bash tests/ray_nodes/install.sh
attempt env EPIKV_NIGHTLY=1 bash tests/run.sh
attempt .venv/bin/python tests/tidy.py tests
# Laws on more models than run.sh takes.
attempt ctest --preset nightly -j 2
attempt bash tests/sanitize.sh
attempt bash tests/aarch64.sh
attempt bash tests/soak.sh 30
for mode in requests faults outage tokenizers families; do attempt bash tests/soak.sh "$mode"; done
attempt bash tests/fuzz.sh 10
attempt .venv/bin/python tests/mutants.py --build build/dev
[ ${#failed[@]} -eq 0 ] && exit 0
printf 'failed: %s\n' "${failed[@]}" >&2
exit 1

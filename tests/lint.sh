#!/usr/bin/env bash
# Format and lint of everything that is tracked: clang-format for C++, ruff for Python; and the types of
# tools/epikv, tools/lab and tools/examples, by mypy. A part of run.sh.
#
#   lint.sh          says what is wrong; exits 1 if anything is
#   lint.sh --fix    mends what the tools can mend
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$PWD/.venv/bin
cpp() { git ls-files -z '*.cc' '*.h' | xargs -0 "$tools/clang-format" --style=file "$@"; }
python() { git ls-files -z '*.py' | xargs -0 "$tools/ruff" "$@" --config tools/pyproject.toml; }
if [ "${1:-}" = --fix ]; then
  cpp -i
  python check --fix
  python format
else
  # pytest knows a test file by its name alone.
  twice=$(git ls-files '*_test.py' | sed 's|.*/||' | sort | uniq -d)
  [ -z "$twice" ] || { echo "more than one test file is named $twice" >&2; exit 1; }
  cpp --dry-run --Werror
  python check
  python format --check
  (cd tools && "$tools/mypy" --no-error-summary)
fi

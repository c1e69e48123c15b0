#!/bin/sh
# Run the suites whose results stand in this folder, and put them here: tables always, pages where they are small.
# What is finished is not run again, so an interrupted call goes on. Usage: benchmarks/suites/run.sh [SUITE…]
set -eu
here=$(dirname "$0")
runs=${BIGSTEP_BENCH:-bench}
[ $# -gt 0 ] || set -- seeds scaling async exchange batch
for suite in "$@"; do
    case $suite in
        batch) seeds=1 ;; # 50 settings
        *) seeds=3 ;;
    esac
    python -m bigstep bench "$suite" --seeds $seeds --out "$runs"
    cp "$runs/$suite/results.md" "$here/$suite.md"
    cp "$runs/$suite/results.csv" "$here/$suite.csv"
    if [ "$(wc -c <"$runs/$suite/report.html")" -le 2000000 ]; then cp "$runs/$suite/report.html" "$here/$suite.html"; fi
done

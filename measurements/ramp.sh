#!/usr/bin/env bash
# A server from idle to overload and back, with auto and with fixed numbers of branches:
#
#     bash measurements/ramp.sh OUT RATES SECONDS [OPTION OF lopa serve …]
#
# OUT.json and OUT.png get what came of it. BRANCHES, TASK, RUNS and SEED say what is asked.
set -euo pipefail
out=${1:?where do the figures go?} rates=${2:?which requests per second, as 1,2,4?} seconds=${3:?how long each?}
shift 3
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
lopa=("${PYTHON:-python3}" -m lopa)
port=${PORT:-8765}
"${lopa[@]}" serve --port "$port" --max-queue 1024 "$@" 2>"$out.log" &
server=$!
trap 'kill $server; wait $server || true' EXIT
until "${PYTHON:-python3}" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null; do
    kill -0 $server 2>/dev/null || { tail -n 3 "$out.log" >&2; exit 1; }
    sleep 1
done
"${lopa[@]}" bench serve --url "http://127.0.0.1:$port/v1" --rates "$rates" --seconds "$seconds" --ramp \
    --branches "${BRANCHES:-auto,0,1,3,7}" --task "${TASK:-words}" --runs "${RUNS:-3}" --seed "${SEED:-0}" \
    --picture "$out.png" --json >"$out.json"

#!/usr/bin/env bash
# The figures in docs/results.md and benchmarks/engine.md that want a GPU, a file each:
#
#     bash benchmarks/gpu.sh OUT [checks|rounds|together|precision|speed|auto|branches|floors|ablation …]
#
# Parts that are not named are left out; without a name all of them run. What a part has decoded
# before (precision, auto, branches, floors, ablation) is not decoded again if OUT has it. LIMIT: seconds for each command.
set -uo pipefail
out=${1:?where do the files go?}
shift
parts=${*:-checks rounds together precision speed auto branches floors ablation}
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
failed=0

measure() { # FILE COMMAND…: standard output to the file, seconds and success to the terminal
    local file=$out/$1 began=$SECONDS
    shift
    if timeout "${LIMIT:-600}" "$@" >"$file.part" 2>"$file.log"; then
        mv "$file.part" "$file"
        echo "$((SECONDS - began)) s: $file"
    else
        failed=1
        echo "FAILED after $((SECONDS - began)) s: $file"
        tail -n 3 "$file.log"
    fi
}

lopa=("$python" -m lopa)
# Studies of answers, not of time: products in TF32, several processes.
study=(env TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 "${lopa[@]}" study)
seven=(--model dummy:dream-7b --dtype bfloat16 --json)
for part in $parts; do
    case $part in
    checks) measure checks.txt "$python" benchmarks/kernels.py --checks-only ;;
    rounds)
        for kind in bf16 fp8 int8; do
            with=(--quantize $kind)
            [ $kind = bf16 ] && with=()
            measure rounds_$kind.json "${lopa[@]}" bench round "${seven[@]}" "${with[@]}" \
                --branches 0,1,3,7,14 --window 64,96 --prefix 768
        done
        ;;
    together)
        for kind in bf16 fp8; do
            with=(--decoder d2f --max-new-tokens 64 --limit 32 --together 32)
            [ $kind = bf16 ] || with+=(--quantize $kind)
            measure together_${kind}_64.json "${lopa[@]}" bench decode "${seven[@]}" "${with[@]}"
            measure together_${kind}_32.json "${lopa[@]}" bench decode "${seven[@]}" "${with[@]}" \
                --append-at 1 # one block at a time
        done
        ;;
    precision) measure precision.txt "$python" benchmarks/precision.py --out "$out/precision.jsonl" ;;
    speed)
        for task in words functions; do
            measure speed_$task.txt "${lopa[@]}" study speed --task $task --limit 48 --seed 6 \
                --out "$out/$task-h200"
        done
        ;;
    auto)
        for task in functions words; do
            measure auto_$task.txt "${study[@]}" auto --task $task --limit 500 \
                --batch-size 64 --workers 6 --out "$out/$task"
        done
        ;;
    branches)
        for task in functions words; do
            measure branches_$task.txt "${study[@]}" branches --task $task --limit 500 \
                --batch-size 64 --workers 6 --out "$out/$task"
        done
        ;;
    floors)
        for task in words functions; do
            measure floors_$task.txt "${study[@]}" calibration --task $task --limit 250 --seed 1 \
                --batch-size 64 --workers 2 --out "$out/$task-guard"
        done
        ;;
    ablation)
        for task in words functions; do
            measure ablation_$task.txt "${study[@]}" ablation --task $task --limit 250 --seed 1 \
                --batch-size 64 --workers 2 --out "$out/$task-ablation"
        done
        ;;
    *)
        echo "no part $part" >&2
        exit 2
        ;;
    esac
done
exit $failed

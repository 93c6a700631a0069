#!/usr/bin/env bash
# The figures in docs/results.md and measurements/kernels.md that need a GPU, a file each:
#
#     bash measurements/gpu.sh OUT [checks|host|constrained|rounds|throughput|cut|experts|prefill|precision|speed|
#                                   cost|load|ramp|auto|branches|floors|ablation|accept|exact|temperature …]
#
# Parts that are not named are left out; without a name all of them run. What a part has decoded
# before (all from precision on but speed and cost) is not decoded again if OUT has it. LIMIT:
# seconds for each command. RUNS: of the ramp.
set -uo pipefail
out=${1:?where do the files go?}
shift
parts=${*:-checks host constrained rounds throughput cut experts prefill precision speed cost load ramp auto branches floors ablation accept exact temperature}
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

answers() { # STUDY SUFFIX OPTIONS…: of both tasks; not of time, so in TF32 and several processes
    local study=$1 suffix=$2
    shift 2
    for task in functions words; do
        measure "$study${suffix}_$task.txt" env TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 "${lopa[@]}" \
            study "$study" --task $task --batch-size 64 "$@" --out "$out/$task$suffix"
    done
}

seven=(--model dummy:dream-7b --dtype bfloat16 --json)
for part in $parts; do
    case $part in
    constrained) measure constrained.json "$python" measurements/constrained.py ;;
    checks) measure checks.txt "$python" measurements/kernels.py --checks-only ;;
    host) # one core, no GPU: that of this machine
        measure host_decoder.jsonl env OMP_NUM_THREADS=1 "$python" measurements/decoder_overhead.py
        measure host_row_budget.txt env OMP_NUM_THREADS=1 "$python" measurements/row_budget.py
        measure host_time.txt env OMP_NUM_THREADS=1 "$python" measurements/host_time.py
        ;;
    rounds)
        for kind in bf16 fp8 int8; do
            with=(--quantize $kind)
            [ $kind = bf16 ] && with=()
            measure rounds_$kind.json "${lopa[@]}" bench round "${seven[@]}" "${with[@]}" \
                --branches 0,1,3,7,14 --window 64,96 --prefix 768 --passes 3
        done
        ;;
    throughput)
        for kind in bf16 fp8; do
            with=(--decoder d2f --max-new-tokens 64 --limit 32 --together 32)
            [ $kind = bf16 ] || with+=(--quantize $kind)
            # Tokens per row: two blocks of 32; one block at a time, of 32 and of 16.
            measure throughput_${kind}_64.json "${lopa[@]}" bench decode "${seven[@]}" "${with[@]}"
            with+=(--append-at 1)
            measure throughput_${kind}_32.json "${lopa[@]}" bench decode "${seven[@]}" "${with[@]}"
            with+=(--block-size 16)
            measure throughput_${kind}_16.json "${lopa[@]}" bench decode "${seven[@]}" "${with[@]}"
        done
        ;;
    cut) measure cut.txt "$python" measurements/cut_step.py --out "$out/cut.json" ;;
    experts)
        for what in checks tiles parts rounds flash; do
            measure experts_$what.txt "$python" measurements/experts.py $what --out "$out/experts_$what.jsonl"
        done
        ;;
    prefill)
        measure prefill_attention.txt "$python" measurements/prefill_attention.py
        measure prefill_7b.txt "$python" measurements/prefill_attention.py --model dummy:dream-7b
        measure rounds_32k.json "${lopa[@]}" bench round "${seven[@]}" --branches 0,7 --window 64 --prefix 32768
        ;;
    precision) measure precision.txt "$python" measurements/precision.py --out "$out/precision.jsonl" ;;
    speed)
        for task in words functions; do
            measure speed_$task.txt "${lopa[@]}" study speed --task $task --limit 144 --seed 6 \
                --out "$out/$task-h200"
        done
        ;;
    cost)
        measure cost_tiny.txt "${lopa[@]}" bench cost --dtype bfloat16 --out "$out/round_cost_tiny_bf16.json"
        measure cost_7b.txt "${lopa[@]}" bench cost "${seven[@]}" --out "$out/round_cost_7b_bf16.json"
        ;;
    load) # timed: alone on the machine; then by the cost of a 7B model
        for task in words functions; do
            with=(--task $task --dtype bfloat16)
            measure load_${task}_few.txt "${lopa[@]}" study load "${with[@]}" --limit 256 --seed 61 \
                --at-once 1,2,4,8 --out "$out/$task-load-h200-few"
            measure load_${task}_many.txt "${lopa[@]}" study load "${with[@]}" --limit 512 --seed 61 \
                --at-once 16,32,64,128 --out "$out/$task-load-h200-many"
            measure load_$task.txt "${lopa[@]}" study load "${with[@]}" --limit 128 --seed 97 \
                --at-once 1,2,4,8,16,32,64,128 --batch-size 64 --out "$out/$task-load" \
                --cost measurements/h200/round_cost_7b_bf16.json
        done
        ;;
    ramp) # a server of the built-in model, from idle to overload and back
        for task in words functions; do
            measure ramp_$task.txt env TASK=$task BRANCHES=auto,0,1,3,7,15 RUNS=${RUNS:-5} SEED=11 \
                bash measurements/ramp.sh "$out/ramp_$task" 20,60,120,180 0.7 --dtype bfloat16 --warmup 8192
        done
        ;;
    auto | branches) answers $part "" --limit 500 --workers 6 ;;
    floors) answers calibration -guard --limit 250 --seed 1 --workers 2 ;;
    accept)
        with=(--limit 1000 --seed 9101 --workers 3)
        answers accept -accept "${with[@]}"
        answers accept -accept-held-out --split held-out "${with[@]}"
        answers accept -accept-block --attention block "${with[@]}"
        ;;
    exact) # in fp32: its claim is about tokens
        for task in functions words; do
            measure exact_$task.txt "${lopa[@]}" study exact --task $task --limit 500 --seed 9102 \
                --batch-size 64 --workers 3 --out "$out/$task-exact"
        done
        ;;
    temperature)
        for task in functions words; do
            measure temperature_$task.txt "${lopa[@]}" eval $task --limit 500 --seed 9103 \
                --sweep temperature=0,0.2,0.5,0.7,1,1.5 --batch-size 64 --out "$out/$task-temperature"
        done
        ;;
    ablation) answers ablation -ablation --limit 250 --seed 1 --workers 2 ;;
    *)
        echo "no part $part" >&2
        exit 2
        ;;
    esac
done
exit $failed

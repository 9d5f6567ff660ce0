#!/bin/sh
# The public benchmarks on one GPU, most informative first; each part resumes if it is run again.
#
#     KAIROSFL_DATA=... [SEEDS=3] [PRECISION=bfloat16] sh benchmarks/public.sh PART [RESULTS]
#
# bfloat16 nearly halves the time of a ResNet-18, and the results say which precision a run had.
#
# Estimates for one H200, from the images per second in docs/gpu.md (a run of NIID-Bench or FL-Simulator trains on
# 25 million images):
#     niid10         12 runs side by side (Dir(0.5), two labels, quantity), 300 M images, about 6 min
#     niid10-noise    4 runs, 100 M images, about 2 min
#     flsim-fedavg    1 run alone, for its clock: 4 min
#     flsim-scaffold  SCAFFOLD and FedDyn side by side, about 8 min
#     niid10-why      other readings of cells that differ: SCAFFOLD and FedProx, 6 runs, 2.5 min
#     niid10-again   two more seeds of these four cells and of FedAvg, 10 runs beyond those of niid10, about 4 min
#     niid100-dir     4 runs, Dir(0.5) alone, 3 min
#     niid100-again  two more seeds of FedAvg and SCAFFOLD there, 4 runs beyond those of niid100-dir, about 2 min
#     niid100        12 runs (Dir(0.5), two labels, IID), 300 M images, about 6 min
#     flsim-fedcm     FedCM, about 5 min
#     flsim-released  FedAvg, SCAFFOLD and FedCM as in its code, 13 min: run it twice
#     flsim-released-sam  MoFedSAM as in its code, about 9 min
#     flsim-mofedsam  MoFedSAM, two gradients a step, about 9 min
#     pfl            CIFAR-10 IID and Dir(0.1), Dir(0.1) with privacy, BlazeFL and FLUTE, about 4 min
#     aware-ridge     FedAWARE with a ridge, 6 runs of fedaware/solver, 45 M images, about 2 min
#     niid10-flower   8 runs (three labels, IID), which Flower alone published, about 4 min
#     niid10-seeds    the second and third seeds of niid10: 24 runs, about 12 min; run it twice
set -eu
part=$1 results=${2:-results} runs=${RUNS:-runs/public} paper=public

cells() { # ITEM, then cells
    item=$1
    shift
    for cell; do set -- "$@" --cells "$cell"; shift; done
    timeout -s INT "${LIMIT:-540}" ${PYTHON:-python} -m kairosfl reproduce "$paper/$item" "$@" --seeds "${SEEDS:-1}" \
        --engine batched --device cuda --set "run.precision='${PRECISION:-tf32}'" --quiet --out "$runs/$item" \
        --results "$results"
}

case $part in
niid10) cells niid-bench-10 dir0.5 labels2 quantity0.5 ;;
niid10-why) cells niid-bench-10-readings ;;
niid10-again) SEEDS=${SEEDS:-3} cells niid-bench-10 labels2-fedavg labels2-fedprox labels2-scaffold noise0.1-fedprox quantity0.5-scaffold ;;
niid100-dir) cells niid-bench-100 dir0.5 ;;
niid100-again) SEEDS=${SEEDS:-3} cells niid-bench-100 "dir0.5 fedavg" "dir0.5 scaffold" ;;
niid10-noise) cells niid-bench-10 noise0.1 ;;
niid10-flower) cells niid-bench-10 labels3 iid ;;
niid10-seeds) SEEDS=3 cells niid-bench-10 dir0.5 labels2 quantity0.5 ;;
aware-ridge) paper=fedaware SEEDS=2 cells solver "ridge*" ;;
niid100) cells niid-bench-100 ;;
flsim-released) cells fl-simulator-readings "dir0.1-fedavg" "dir0.1-scaffold" "dir0.1-fedcm" ;;
flsim-released-sam) cells fl-simulator-readings "mofedsam" ;;
flsim-fedavg) cells fl-simulator "dir0.1 fedavg" ;;
flsim-scaffold) cells fl-simulator "dir0.1 scaffold" "dir0.1 feddyn" ;;
flsim-fedcm) cells fl-simulator "dir0.1 fedcm" ;;
flsim-mofedsam) cells fl-simulator "dir0.1 mofedsam" ;;
pfl) for item in pfl-cifar10-iid blazefl flute-mnist pfl-cifar10-dirichlet pfl-cifar10-private; do cells "$item"; done ;;
*) echo "unknown part $part; see the list in $0" >&2; exit 2 ;;
esac

#!/bin/sh
# Tables of the papers and the public benchmarks on one GPU; each part resumes if it is run again.
#
#     KAIROSFL_DATA=... [SEEDS=3] [FIRST=0] [ROUNDS=60] [EVERY=2] [PRECISION=tf32] sh reproductions/tables.sh PART [RESULTS]
#
# The results say which precision a run had: parts whose estimate says so have bfloat16 unless another is asked for. Estimates are for one H200, from the images per second in docs/gpu.md.
# Parts with small models leave room on the GPU: parts.sh runs several side by side. Six parts whose estimates add up to 36 minutes
# (niid10-parties with niid10-first, aware-swapped with three seeds, niid100-iid, fedcl-resnet18, aware-news, alt-thresholds) were done in 16, but for one round of two runs and six of a third.
#
# Public benchmarks, most informative first (a run of NIID-Bench or FL-Simulator trains on 25 million images):
#     niid10         12 runs side by side (Dir(0.5), two labels, quantity), 300 M images, about 6 min
#     niid10-noise    4 runs, 100 M images, about 2 min
#     flsim-fedavg    1 run alone, for its clock: 4 min
#     flsim-scaffold  SCAFFOLD and FedDyn side by side, about 8 min
#     niid10-why      other readings of cells that differ: SCAFFOLD, FedProx and reflected borders, 13 runs, about 5 min
#     niid10-parties  all methods with the very parties of Flower's re-run, 12 runs, about 6 min
#     niid10-first    the same with those of NIID-Bench's first run, 8 runs, about 4 min
#     niid10-again   two more seeds of these four cells and of FedAvg, 10 runs beyond those of niid10, about 4 min
#     niid100-dir     4 runs, Dir(0.5) alone, 3 min
#     niid100-again  two more seeds of FedAvg and SCAFFOLD there, 4 runs beyond those of niid100-dir, about 2 min
#     niid100-why     SCAFFOLD there with the paper's divisor and with clipping, 6 runs, about 3 min
#     niid100-iid     FedAvg with IID data and reflected borders, 1 run, about 2 min
#     niid100         8 runs (two labels, IID), 200 M images, took 3.5 min on a GPU shared with 8 runs of niid10-flower
#     flsim-fedcm     FedCM, about 5 min
#     flsim-released  FedAvg, SCAFFOLD and FedCM as in its code, 13 min: run it twice
#     flsim-released-sam  MoFedSAM as in its code, took 10.5 min on a shared GPU
#     flsim-sam-crops  MoFedSAM with its crops alone, and with alpha = 0.05, side by side took 18 min on a shared GPU: run it twice
#     flsim-mofedsam  MoFedSAM, two gradients a step, about 9 min
#     pfl            CIFAR-10 IID and Dir(0.1), Dir(0.1) with privacy, BlazeFL and FLUTE, took 2.5 min
#     pfl-dirichlet  the second and third of these alone, took 1 and 3 min on a shared GPU
#     niid10-flower   12 runs (three labels, IID, Fashion-MNIST), which Flower alone published, about 5 min
#     niid10-seeds    the second and third seeds of niid10: 24 runs, about 12 min; run it twice
#
# What the papers' tables lack, most informative first:
#     aware-swapped   FedAWARE's Table 2 with clients mixed up, as in its released server, its FedProx, and longer steps, 11 runs a seed, 83 M images, about 4 min
#     aware-stored    the same methods on images that are cropped once as well, 10 runs a seed, 76 M images, about 4 min
#     aware-redrawn   the same with another partition for each seed, and FedAMS x AWARE with half the step, 10 runs a seed, 76 M images, about 4 min
#     aware-ridge     FedAWARE with a ridge, 6 runs of fedaware/solver, 45 M images, about 2 min
#     fedcl-200       FedCL's 200 rounds, CIFAR-10 and Fashion-MNIST, FedAvg, 6 runs; CIFAR-10's 3 took 5 min on a shared GPU
#     fedcl-cifar100  the same with CIFAR-100, 3 runs, about 3 min
#     pa3fed-cifar100 PA3Fed, h = 0.1, 40 rounds, five methods with and without it, ResNet-18, 20 M images: about 11 min in bfloat16
#     aware-cifar100  FedAvg, FedAWARE and FedAvg x AWARE, ResNet-18, 27 M images, took 12 min in bfloat16 on a GPU shared with fedcl-lstm
#     aware-cifar100-swapped  the same with clients mixed up, 3 runs, took 11.5 min likewise
#     alt-readings    ALT's other readings with MOON, 2 runs of up to 50 M images, took 3 min on a shared GPU
#     alt-thresholds  ALT's thresholds, 6 runs of up to 50 M images, about 5 min
#     alt-equal       ALT and FedAvg with as few epochs, averaged, 5 runs of 15 to 50 M images, took 9 min on a shared GPU
#     pa3fed-averaged FedAvg with and without PA3Fed, averaged, AlexNet, 4 runs of 12.5 M images; the first two took 9 min on a shared GPU
#     fedcl-vgg11     FedCL's 200 rounds with VGG-11, CIFAR-10, FedAvg, 3 runs: 2.5 min a seed in bfloat16
#     fedcl-lstm      FedCL on Shakespeare, FedAvg, 3 runs of 10 M sequences or more: 128 of the 200 rounds took 26 min in bfloat16 on a shared GPU
#     fedcl-resnet18  FedCL with ResNet-18, CIFAR-10, FedAvg, 3 runs, 10 M images, about 4 min in bfloat16, took 15 on a shared GPU
#     beyond-moment   kairos with rules that decide when clients are asked, on held-out samples, 7 runs, about 2 min
#     beyond-controls averaged FedAvg with the recipes of the presets, three seeds, about 6 min
#     aware-news      FedAvg and FedAvg x AWARE on AG News, from scratch, at two learning rates, 4 runs, about 3 min in bfloat16; a round takes 6 s in tf32
#     aware-figures   FedAWARE's Figures 1, 6 and 7, 10 runs, 120 M images, about 6 min
set -eu
part=$1 results=${2:-results} runs=${RUNS:-runs/tables} paper=public
trap 'kill -ALRM "$child"' INT TERM # as if its time were up: timeout passes no Ctrl-C on

cells() { # ITEM, then cells
    item=$1
    shift
    for cell; do set -- "$@" --cells "$cell"; shift; done
    timeout -s INT "${LIMIT:-540}" ${PYTHON:-python} -m kairosfl reproduce "$paper/$item" "$@" \
        --seeds "${SEEDS:-1}" --first-seed "${FIRST:-0}" --engine batched --device cuda \
        --set "run.precision='${PRECISION:-tf32}'" ${EVERY:+--set "run.eval_every=$EVERY"} ${ROUNDS:+--rounds "$ROUNDS"} --quiet --out "$runs/$paper-$item" --results "$results" &
    child=$! code=0
    wait "$child" || code=$?
    if [ "$code" -gt 128 ]; then wait "$child"; fi # a signal ended the wait, not yet the run
    return "$code"
}

case $part in
niid10) cells niid-bench-10 dir0.5 labels2 quantity0.5 ;;
niid10-why) cells niid-bench-10-readings released after mu0.001 reflect ;;
niid10-parties) cells niid-bench-10-readings flower ;;
niid10-first) cells niid-bench-10-readings first ;;
niid10-again) SEEDS=${SEEDS:-3} cells niid-bench-10 labels2-fedavg labels2-fedprox labels2-scaffold noise0.1-fedprox quantity0.5-scaffold ;;
niid100-dir) cells niid-bench-100 dir0.5 ;;
niid100-again) SEEDS=${SEEDS:-3} cells niid-bench-100 "dir0.5 fedavg" "dir0.5 scaffold" ;;
niid100-why) SEEDS=${SEEDS:-3} cells niid-bench-100-readings dir0.5 ;;
niid100-iid) cells niid-bench-100-readings iid ;;
niid10-noise) cells niid-bench-10 noise0.1 ;;
niid10-flower) cells niid-bench-10 labels3 iid fashion_mnist ;;
niid10-seeds) SEEDS=3 cells niid-bench-10 dir0.5 labels2 quantity0.5 ;;
aware-swapped) paper=fedaware cells table2 "cifar10 swapped" cifar10-fedprox-released cifar10-fedaware-longer ;;
aware-stored) paper=fedaware cells table2 "cifar10 stored" ;;
aware-redrawn) paper=fedaware cells table2 "cifar10 redrawn" cifar10-fedams-aware-shorter ;;
aware-ridge) paper=fedaware SEEDS=2 cells solver "ridge*" ;;
niid100) cells niid-bench-100 labels2 iid ;;
flsim-released) cells fl-simulator-readings "dir0.1-fedavg" "dir0.1-scaffold" "dir0.1-fedcm" ;;
flsim-released-sam) cells fl-simulator-readings "mofedsam-released" ;;
flsim-sam-crops) cells fl-simulator-readings "mofedsam-crops*" ;;
flsim-fedavg) cells fl-simulator "dir0.1 fedavg" ;;
flsim-scaffold) cells fl-simulator "dir0.1 scaffold" "dir0.1 feddyn" ;;
flsim-fedcm) cells fl-simulator "dir0.1 fedcm" ;;
flsim-mofedsam) cells fl-simulator "dir0.1 mofedsam" ;;
fedcl-200) paper=fedcl cells accuracy "cifar10-alexnet-a0.1-fedavg*" "fashion_mnist-alexnet-a0.1-fedavg*" ;;
fedcl-cifar100) paper=fedcl cells cifar100 "cifar100-alexnet-a0.1-fedavg*" ;;
alt-equal) paper=alt cells equal-epochs ;;
pa3fed-averaged) paper=pa3fed cells averaged ;;
fedcl-vgg11) paper=fedcl PRECISION=${PRECISION:-bfloat16} cells accuracy "cifar10-vgg11-a0.1-fedavg*" ;;
fedcl-resnet18) paper=fedcl PRECISION=${PRECISION:-bfloat16} cells resnet18 "cifar10-resnet18-a0.1-fedavg*" ;;
beyond-moment) paper=beyond cells search-moment ;;
beyond-controls)
    SEEDS=${SEEDS:-3} paper=beyond
    cells fedaware thrifty-average
    for item in cifar100 fedcl alt; do cells "$item" average-same; done
    ;;
fedcl-lstm) paper=fedcl PRECISION=${PRECISION:-bfloat16} cells shakespeare "shakespeare-lstm-fedavg*" ;;
pa3fed-cifar100)
    names=
    for base in fedavg vrlsgd fedprox fednova fedmut; do
        names="$names cifar100-h0.1-printed-$base cifar100-h0.1-printed-$base-pa3fed"
    done
    paper=pa3fed PRECISION=${PRECISION:-bfloat16}
    cells table2 $names
    ;;
aware-cifar100) paper=fedaware PRECISION=${PRECISION:-bfloat16} cells table2 cifar100-fedavg cifar100-fedaware cifar100-fedavg-aware ;;
aware-cifar100-swapped) paper=fedaware PRECISION=${PRECISION:-bfloat16} cells table2 cifar100-fedavg-swapped cifar100-fedaware-swapped cifar100-fedavg-aware-swapped ;;
aware-news) paper=fedaware PRECISION=${PRECISION:-bfloat16} cells agnews ;;
aware-figures) for item in figure1 figure7 figure6; do paper=fedaware cells "$item"; done ;;
alt-readings) paper=alt cells figure2 "cifar10-moon-alt-*" ;;
alt-thresholds) paper=alt cells thresholds ;;
pfl) for item in pfl-cifar10-iid blazefl flute-mnist pfl-cifar10-dirichlet pfl-cifar10-private; do cells "$item"; done ;;
pfl-dirichlet) for item in pfl-cifar10-dirichlet pfl-cifar10-private; do cells "$item"; done ;;
*) echo "unknown part $part; see the list in $0" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# One node with 8 GPUs. Submit it in the checkout, with `outpace` on the path: sbatch examples/cluster/slurm_one_node.sh
# A job that is submitted again continues the run.
#SBATCH --job-name=outpace
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=outpace-%j.log
# Five minutes before the time limit SLURM sends SIGTERM to this script, which is outpace by then: it writes a checkpoint.
#SBATCH --signal=B:TERM@300
set -euo pipefail

exec bash examples/cluster/one_node.sh

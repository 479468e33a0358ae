#!/usr/bin/env bash
# Two nodes or more with 8 GPUs each: the learner on the first ones, vLLM servers on the others. Submit it in the
# checkout, with `outpace` and `torchrun` on the path of every node:
#   sbatch examples/cluster/slurm_many_nodes.sh                                  # 16 GPUs, 8 of them for the learner
#   LEARNER_NODES=2 sbatch --nodes=8 examples/cluster/slurm_many_nodes.sh        # 64 GPUs, 16 of them for the learner
# The 32B model of many_nodes.toml needs GPUs with 141 GB for a learner on one node; with 80 GB, use LEARNER_NODES=2 or
# more. The checkout and the environments must be in a folder that all nodes share. A job that is submitted again
# continues the run. Anyone who can reach the servers can change their weights: use this on a private network only.
#SBATCH --job-name=outpace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=outpace-%j.log
#SBATCH --signal=B:TERM@300
set -euo pipefail

config=examples/cluster/many_nodes.toml
run=${RUN:-runs/many_nodes}
vllm=${VLLM_PYTHON:-$HOME/vllm/bin/python}
weights=${WEIGHTS_DIR:-$PWD/weights} # shared by all nodes; every server gets its own copy of the weights here
gpus=${SLURM_GPUS_PER_NODE##*:} # --gpus-per-node, also of the form h100:8
tensor=${TENSOR_PARALLEL:-$gpus}
learners=${LEARNER_NODES:-1} # nodes of the learner
port=8000
count=$((gpus / tensor)) # servers per node
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since SLURM 22.05, srun does not take it from sbatch

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
learner_nodes=("${nodes[@]:0:learners}")
server_nodes=("${nodes[@]:learners}")
if ((gpus % tensor)); then
  echo "TENSOR_PARALLEL: $tensor does not divide the $gpus GPUs of a node; set a divisor" >&2
  exit 2
elif ((learners >= ${#nodes[@]})); then
  echo "LEARNER_NODES: $learners of ${#nodes[@]} nodes leave none for servers; lower it, or use more with --nodes" >&2
  exit 2
fi

# Servers: one `outpace serve` per node, which stops its servers when it gets SIGTERM.
srun --nodes="${#server_nodes[@]}" --ntasks="${#server_nodes[@]}" --nodelist="$(IFS=, && echo "${server_nodes[*]}")" \
  outpace serve "$config" --all-gpus --engine.count "$count" --launch.port "$port" --launch.python "$vllm" \
  --launch.args "[\"--host\", \"0.0.0.0\", \"--tensor-parallel-size\", \"$tensor\"]" &
servers=$!
trap 'kill "$servers" 2>/dev/null || true' EXIT

urls=()
for node in "${server_nodes[@]}"; do
  for ((index = 0; index < count; index++)); do
    urls+=("http://$node:$((port + index))")
  done
done
for url in "${urls[@]}"; do
  until curl --silent --fail --output /dev/null "$url/health"; do
    kill -0 "$servers" || exit 1 # a server could not start; its error is in the log of this job
    sleep 5
  done
done

# The learner and everything else, on this node, the first one, or with torchrun on the first ones: then this one has rank
# 0, which is the controller. The servers may be on other nodes than last time.
arguments=("$config" --run.dir "$run")
if [ -e "$run/config.toml" ]; then
  arguments=(--resume "$run")
fi
mkdir -p "$weights"
arguments+=(--engine.urls "$(IFS=, && echo "${urls[*]}")" --weights.dir "$weights" --learner.devices $((gpus * learners)))
if [ "$learners" -gt 1 ]; then
  # shellcheck disable=SC2016 # every task expands its own SLURM_PROCID
  srun --nodes="$learners" --ntasks="$learners" --nodelist="$(IFS=, && echo "${learner_nodes[*]}")" \
    bash -c 'exec torchrun --node-rank "$SLURM_PROCID" "$@"' bash --nnodes "$learners" --nproc-per-node "$gpus" \
    --master-addr "${nodes[0]}" --master-port 29500 -m outpace train "${arguments[@]}" &
else
  outpace train "${arguments[@]}" &
fi
trainer=$!
# Before the time limit the controller writes a checkpoint and exits. A signal to srun would also reach torchrun, which
# kills its processes after 30 s.
trap 'kill -TERM "$(cat "$run/run.lock")"' TERM

wait "$trainer" || true # a signal ends this wait early
wait "$trainer"

#!/usr/bin/env bash
# The learner under torchrun, on one node or several. Start it in the checkout, with torchrun and outpace's environment on
# the path. One node with 8 GPUs, the learner on 4 of them and vLLM servers on the others:
#   bash examples/cluster/torchrun.sh
# Two nodes with 8 GPUs each for the learner, and servers that run on others already: the same command on both
#   NODES=2 ENDPOINT=node1:29500 WEIGHTS_DIR=/shared/weights URLS=http://node3:8000 bash examples/cluster/torchrun.sh
# The checkout and RUN must be in a folder that all nodes see. A second start continues the run. To stop it with a
# checkpoint, send SIGTERM to the process in $RUN/run.lock: torchrun itself kills its processes 30 s after a signal.
set -euo pipefail

nodes=${NODES:-1}
run=${RUN:-runs/torchrun}
vllm=${VLLM_PYTHON:-$HOME/vllm/bin/python}

if [ "$nodes" -gt 1 ]; then
  gpus=${GPUS:-8} # of every node, for the learner
  arguments=(examples/cluster/many_nodes.toml --run.dir "$run")
  more=(--engine.urls "$URLS" --weights.dir "$WEIGHTS_DIR")
else
  gpus=${GPUS:-4} # the servers use the others
  arguments=(examples/cluster/one_node.toml --run.dir "$run" --launch.python "$vllm")
  more=()
fi
if [ -e "$run/config.toml" ]; then
  arguments=(--resume "$run")
fi
exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-endpoint "${ENDPOINT:-localhost:29500}" \
  -m outpace train "${arguments[@]}" "${more[@]}" --learner.devices $((nodes * gpus))

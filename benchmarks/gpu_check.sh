#!/usr/bin/env bash
# Runs benchmarks/gpu_check.py where Python 3.12, NumPy and CuPy are installed, and the rest of what hpctrain needs is in wheels:
# `make gpu-wheels` fetches these into .whl/. Nothing is installed outside a temporary folder, which goes away at the end.
#
#   benchmarks/gpu_check.sh [arguments of gpu_check.py]
#
# PYTHON: the interpreter (python3). WHEELS: folder of the wheels (.whl of the project). OUT: folder of the results (gpu-check),
# from the folder of the caller: gpu-check.json and gpu-check.log, both written after every stage. What cannot be installed is
# reported there; everything else runs.
set -uo pipefail
OUT=${OUT:-gpu-check}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=$work/cache CUPY_CACHE_DIR=$work/cupy
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-8}
mkdir -p "$work/site" "$work/out"
setup=$work/out/setup.log

# pip --target loses the folder of MPICH's libraries: that wheel is unpacked as it is. Where it is missing, nothing runs on ranks.
for wheel in "$WHEELS"/mpich-*.whl; do
    [ -e "$wheel" ] || continue
    "$PYTHON" -m zipfile -e "$wheel" "$work/mpich" >>"$setup" 2>&1 || { echo "$wheel cannot be unpacked" >>"$setup"; continue; }
    mpich=$(echo "$work"/mpich/mpich-*.data/data)
    chmod +x "$mpich"/bin/*
    export MPI4PY_LIBMPI=$mpich/lib/libmpi.so.12 LD_LIBRARY_PATH=$mpich/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PATH=$mpich/bin:$PATH
done
others=$(find "$WHEELS" -type f -name '*.whl' ! -name 'mpich-*')
if [ -n "$others" ]; then
    # shellcheck disable=SC2086  # names of wheels have no spaces
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$work/site" $others >"$work/pip.log" 2>&1 ||
        { cat "$work/pip.log"; echo "pip cannot install the wheels of $WHEELS"; } >>"$setup"
fi
failure=$([ ! -s "$setup" ] || tail -c 2000 "$setup")
export PYTHONPATH=$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" -m benchmarks.gpu_check --out "$work/out" --publish "$OUT" --setup-failure="$failure" "$@"

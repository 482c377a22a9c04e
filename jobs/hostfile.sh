#!/bin/bash
# Train on hosts without a scheduler, listed in a file.
# Site profile hostfile, tested on two network namespaces of one machine. Guide:
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
# `hpctrain submit` writes and submits such a script for a configuration:
#   hpctrain submit configs/imagenet-resnet50.yaml --site hostfile --nodes 2
# By hand: edit the lines marked <--, then check the configuration on the login node and submit:
#   hpctrain config check configs/quickstart.yaml && bash jobs/hostfile.sh configs/quickstart.yaml
# Submitted again, it continues from the newest checkpoint of the run with the same name.

set -euo pipefail

fail() {
    echo "job script: $1" >&2
    exit 1
}

# Each start appends its output.
LOG=hpctrain.log
if [ $# -eq 0 ]; then
    echo "usage: bash jobs/hostfile.sh CONFIG [OVERRIDE ...]" >&2
    exit 2
fi
TRAIN=("$@")
ENVIRONMENT=.venv                 # <-- the environment with hpctrain and an mpi4py for this site's MPI; empty: python is on PATH
DOCTOR_SECONDS=80                 # <-- time limit of the check of the nodes before the training; 0: no check
STRICT=--strict                   # <-- warnings of that check end the job, too; empty: they are only printed
STAGE=""                          # <-- a tar of the environment to unpack on each node; empty: none (see docs/clusters.md)
HOSTFILE=hosts                    # <-- one host per line; this directory and the environment have the same path on all
NODES=2                           # <--
RANKS_PER_NODE=4                  # <-- unbound ranks share a host's cores evenly

if [ -n "$ENVIRONMENT" ] && [ -d "$ENVIRONMENT/bin" ]; then
    PATH="$(cd "$ENVIRONMENT/bin" && pwd):$PATH"
fi

# Parallel file systems often have no locks (https://hdfgroup.github.io/hdf5/develop/_file_lock.html).
export HDF5_USE_FILE_LOCKING=FALSE
# A rank uses one thread for each core that it is bound to; a number from the login shell would override that.
unset OMP_NUM_THREADS

echo "output goes to $LOG"
exec >>"$LOG" 2>&1
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
# Options of mpiexec differ; Open MPI's passes no variables to other hosts by itself, and binds each rank to a single core.
case "$(mpiexec --version 2>&1)" in
    *"Open MPI"*)
        MPIEXEC=(mpiexec -hostfile "$HOSTFILE" --bind-to none -x TERM=dumb -x PATH -x HDF5_USE_FILE_LOCKING)
        PER_NODE=(--map-by "ppr:$RANKS_PER_NODE:node")
        ON_EACH=("${MPIEXEC[@]}" -n "$NODES" --map-by ppr:1:node)
        ;;
    *)
        MPIEXEC=(mpiexec -hostfile "$HOSTFILE")
        PER_NODE=(-ppn "$RANKS_PER_NODE")
        ON_EACH=("${MPIEXEC[@]}" -n "$NODES" -ppn 1)
        ;;
esac
LAUNCH=("${MPIEXEC[@]}" -n $((NODES * RANKS_PER_NODE)) "${PER_NODE[@]}")

# Unpack the environment on each node's own disk, so that thousands of ranks do not read it from one file system (unverified: /tmp
# is on a host's own disk on most machines).
UNPACK=$(
    cat <<'END'
rm -rf "$2"
mkdir -p "$2"
tar -xf "$1" -C "$2"
if [ -x "$2/bin/conda-unpack" ]; then "$2/bin/python" "$2/bin/conda-unpack"; fi
END
)
if [ -n "$STAGE" ]; then
    ON_NODE="${TMPDIR:-/tmp}/hpctrain-$$"
    "${ON_EACH[@]}" bash -ec "$UNPACK" unpack "$STAGE" "$ON_NODE" ||
        fail "$STAGE could not be unpacked in $ON_NODE on each node, so nothing was started; free space, or leave STAGE empty."
    PATH="$ON_NODE/bin:$PATH"
fi

# Check the nodes with the training's ranks, for a few seconds: this finds a wrong launcher, overlapping cores or a full disk.
if [ "$DOCTOR_SECONDS" -gt 0 ]; then
    CHECKED=()
    for word in "${TRAIN[@]}"; do
        case "$word" in --auto) ;; -*) break ;; esac # the other options are those of train
        CHECKED+=("$word")
    done
    status=0
    timeout --kill-after=10 "$DOCTOR_SECONDS" "${LAUNCH[@]}" python -m mpi4py -m hpctrain doctor "${CHECKED[@]}" ${STRICT:+"$STRICT"} ||
        status=$?
    if [ "$status" -ne 0 ]; then
        echo "job script: the doctor ended with code $status (124: not within $DOCTOR_SECONDS s; 255: ssh cannot reach a host in $HOSTFILE), so no training was started" >&2
        exit "$status"
    fi
fi

# A run that was stopped by a signal or its time limit creates this file and exits with 0: launchers kill the other ranks if one
# exits with another code.
STOPPED=./.stopped-"$$"
rm -f "$STOPPED"
status=0
# Pass requests to stop on as USR1, which launchers forward to the ranks.
interrupted=yes
launcher=""
trap 'interrupted=yes; [ -z "$launcher" ] || kill -USR1 "$launcher" || true' USR1 TERM INT HUP
"${LAUNCH[@]}" python -m mpi4py -m hpctrain train "${TRAIN[0]}" --resume auto --stopped-file "$STOPPED" "${TRAIN[@]:1}" &
launcher=$!
while [ -n "$interrupted" ]; do
    interrupted=""
    status=0
    wait "$launcher" || status=$?
done
trap - USR1 TERM INT HUP
if [ -e "$STOPPED" ]; then
    rm -f "$STOPPED"
    [ "$status" -ne 0 ] || status=85
fi

if [ -n "$STAGE" ]; then
    "${ON_EACH[@]}" rm -rf "$ON_NODE" || true
fi
# 85: stopped by a signal or the time limit, with a checkpoint; there is no queue to submit it to again.
if [ "$status" -eq 85 ]; then
    echo "job script: stopped with a checkpoint; start it again to continue" >&2
fi
exit "$status"

#!/bin/bash
# Train on this machine alone, without a scheduler.
# Site profile local, tested on one machine. Guide:
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
# One for a configuration, written and submitted:
#   hpctrain submit configs/imagenet-resnet50.yaml --site local --nodes 1
# By hand: edit the lines marked <--, check the configuration where you are, then
#   hpctrain config check configs/quickstart.yaml && bash jobs/local.sh configs/quickstart.yaml
# Submitted again, it goes on from the newest checkpoint of the run of that name.

set -euo pipefail

# Output of the next start stands behind that of this one.
LOG=hpctrain.core.log
if [ $# -eq 0 ]; then
    echo "usage: bash jobs/local.sh CONFIG [OVERRIDE ...]" >&2
    exit 2
fi
TRAIN=("$@")
ENVIRONMENT=.venv                 # <-- the environment with hpctrain and an mpi4py for this site's MPI; empty: python is on PATH
DOCTOR_SECONDS=80                 # <-- that a look at the nodes may take, which ends itself after 60; 0: none
STRICT=--strict                   # <-- warnings of that look end the job, too; empty: they are only printed
NODES=1
RANKS_PER_NODE=2                  # <-- ranks that nobody binds share a host's cores evenly

if [ -n "$ENVIRONMENT" ] && [ -d "$ENVIRONMENT/bin" ]; then
    PATH="$(cd "$ENVIRONMENT/bin" && pwd):$PATH"
fi

# Parallel file systems often have no locks (https://hdfgroup.github.io/hdf5/develop/_file_lock.html).
export HDF5_USE_FILE_LOCKING=FALSE
# A rank computes with a thread on each core that it is bound to; a number from the login shell would overrule that.
unset OMP_NUM_THREADS

echo "output goes to $LOG"
exec >>"$LOG" 2>&1
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
LAUNCH=(mpiexec -n $((NODES * RANKS_PER_NODE)))

# The same ranks as of the training, for seconds: a wrong launcher, cores that overlap or a full disk are told before.
if [ "$DOCTOR_SECONDS" -gt 0 ]; then
    CHECKED=()
    for word in "${TRAIN[@]}"; do
        case "$word" in -*) break ;; esac # options are those of train
        CHECKED+=("$word")
    done
    status=0
    timeout --kill-after=10 "$DOCTOR_SECONDS" "${LAUNCH[@]}" python -m mpi4py -m hpctrain doctor "${CHECKED[@]}" ${STRICT:+"$STRICT"} ||
        status=$?
    if [ "$status" -ne 0 ]; then
        echo "job script: the doctor ended with code $status (124: not within $DOCTOR_SECONDS s), so nothing is trained" >&2
        exit "$status"
    fi
fi

# A run that a signal or its time has stopped leaves this file and ends with 0: where a rank ends with another code, launchers
# kill the rest.
STOPPED=./.stopped-"$$"
rm -f "$STOPPED"
status=0
# Requests to stop are passed on as USR1, which launchers pass on to the ranks.
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

# 85: somebody, or the time limit, has stopped it, with a checkpoint; there is no queue to put it into again.
if [ "$status" -eq 85 ]; then
    echo "job script: stopped with a checkpoint; start it again to go on" >&2
fi
exit "$status"

#!/bin/sh
# Start this on every machine; any of them may be lost and come back.
#
#   RUN=/shared/runs/fair HEAD=node0:29400 sh torchrun.sh fair --preset paper --data /data/imagenet
#
# HEAD is a machine that stays; the rendezvous lives there. RUN lies on storage that all machines see.
set -eu
: "${RUN:?set RUN to the run folder, on storage that all machines see}"
: "${HEAD:?set HEAD to HOST:PORT of a machine that stays}"

# without this, a machine that joins a run in progress waits for a store address that was sent before it joined
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "${NODES:-2:4}" \
    --nproc-per-node "${GPUS:-8}" \
    --max-restarts "${RESTARTS:-100}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD" \
    --rdzv-id "${JOB:-bigstep}" \
    -m bigstep train "$@" --out "$RUN" --resume --timeout "${TIMEOUT:-120}"

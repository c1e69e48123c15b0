#!/bin/bash
# sbatch slurm.sh sony --preset paper --data /data/imagenet
#
# One task a node; torchrun starts a rank a GPU. Slurm sends SIGTERM two minutes before the time limit: the run saves
# itself and leaves with status 143, and this script puts it back into the queue, where it goes on.
#SBATCH --job-name=bigstep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

run=${RUN:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID} # storage that all nodes see
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((29000 + SLURM_JOB_ID % 1000))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:$port" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m bigstep train "$@" --out "$run" --resume --timeout 120
status=$?

# torchrun ends with its own status, so the records tell whether the run is over
if ! python -c 'import json, sys; sys.exit("result" not in json.load(open(sys.argv[1])))' "$run/run.json"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

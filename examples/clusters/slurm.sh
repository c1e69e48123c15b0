#!/bin/bash
# sbatch slurm.sh sony --preset paper --data /data/imagenet
#
# srun starts one rank for each GPU; bigstep finds its place among them. Slurm sends SIGTERM two minutes before the time
# limit: the run saves itself and exits with status 143, and this script requeues the job, which then resumes the run.
# A mistake in the command or an error of the program has another status and is not retried.
#SBATCH --job-name=bigstep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
trap : TERM # a preempted job: this shell stays until the run has saved itself

run=${RUN:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID} # storage that all nodes see
most=${RESTARTS:-20}

srun --kill-on-bad-exit=1 python -m bigstep train "$@" --out "$run" --resume --timeout 120
status=$?

restarts=${SLURM_RESTART_COUNT:-0}
if ((status == 143 && restarts < most)); then
    echo "Stopped by a signal: back into the queue, start $((restarts + 2)) of at most $((most + 1))."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/usr/bin/env bash
# hybridrl launch slurm: `sbatch FILE` starts the run, and resumes it.
#SBATCH --job-name=@@name --nodes=@@nodes --ntasks-per-node=1 --exclusive
#SBATCH --requeue --open-mode=append --signal=B:USR1@300
#SBATCH --output=@@log_pattern/%j.log
#SBATCH --mem=0 @@directives
set -eo pipefail
umask 077
unset RAY_ADDRESS

@@common

token=$logs/$SLURM_JOB_ID.token hosts=$logs/$SLURM_JOB_ID.hosts
trap 'rm -f "$token" "$hosts"' EXIT
trap stop TERM
trap 'limit=1; stop' USR1 # 300 s before the time limit, which ends a job for good
head -c 16 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$token"
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$hosts"
mapfile -t names <"$hosts"
head=$(inside hybridrl launch address "${names[1]:-${names[0]}}" @@interface)

srun --ntasks-per-node=1 --wait=0 --kill-on-bad-exit=0 --cpu-bind=none \
    --open-mode=truncate --output=@@log_pattern/%N.log @@container \
    bash -c "$functions; prepare \"\$0\" && node \"\$@\" \"\$SLURM_NODEID\" \"\$SLURMD_NODENAME\"" \
    "$token" "$head" @@port @@wait @@interface &
export RAY_ADDRESS=$head:@@port
run hybridrl doctor cluster --wait @@wait --hosts "$hosts" --logs "$logs" "$@" || exit

saved() { cat @@latest 2>/dev/null || true; }
before=$(saved) status=0
run hybridrl train "$@" || status=$?
# Stopped by the time limit, with a new step: the same command resumes when the job has its time again.
if [ -n "$limit" ] && [ "$status" = 130 ] && [ "$(saved)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"

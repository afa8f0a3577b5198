# Slurm may signal this shell only. A shell runs a trap only while it waits, never while a child
# runs in its foreground.
told= controller=
trap 'told=USR1; kill -USR1 "$controller" 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$controller" 2>/dev/null' TERM
{controller} &
controller=$!
if [ -n "$told" ]; then kill "-$told" "$controller"; fi
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
# The controller was killed, and could not requeue the job. A cancelled job stays cancelled.
if [ "$status" -gt 128 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

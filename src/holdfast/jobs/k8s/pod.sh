# holdfast: runs SETUP and RUN, and passes the SIGTERM of Kubernetes on as a preemption notice.
setup=$1 run=$2 restart_status=$3 free_codes=$4 restarts=$5 grace_s=$6 shell_start=$7 needs_link=$8
notice=${HOLDFAST_PREEMPTION##*file:} noticed='' child='' status=0
export SKYPILOT_NODE_RANK=${SKYPILOT_NODE_RANK:-$RANK}
export SKYPILOT_SETUP_NODE_RANK=$SKYPILOT_NODE_RANK

handles_sigterm() {
  local key mask
  {
    while read -r key mask; do
      if [ "$key" = SigCgt: ]; then return $((! (16#$mask >> 14 & 1))); fi
    done <"/proc/$1/status"
  } 2>/dev/null
  return 1
}

has_word() {  # in a file whose words end with NUL
  local words one
  { mapfile -d '' -t words <"$1"; } 2>/dev/null
  for one in "${words[@]}"; do
    if [ "$one" = "$2" ]; then return 0; fi
  done
  return 1
}

is_keeper() { has_word "/proc/$1/cmdline" holdfast.checkpoint.keeper; }  # it ends by itself

keepers_run() {
  local process
  for process in /proc/[0-9]*; do
    if is_keeper "${process#/proc/}" && has_word "$process/environ" "HOLDFAST_NODE=$HOLDFAST_NODE"; then
      return 0
    fi
  done
  return 1
}

forward() {  # to the topmost processes that handle SIGTERM: `tee` and data loaders would die of it
  local children one
  if is_keeper "$1"; then return; fi
  if handles_sigterm "$1"; then kill -TERM "$1" 2>/dev/null; return; fi
  for children in /proc/"$1"/task/*/children; do
    for one in $(cat "$children" 2>/dev/null); do forward "$one"; done
  done
}

end_if_noticed() {
  if [ -n "$noticed" ]; then
    echo 'holdfast: the pod is being ended, and is to be restarted' >&2
    exit "$restart_status"
  fi
}

on_sigterm() {
  noticed=yes
  : >"$notice"
  if [ "$phase" = setup ]; then end_if_noticed; fi
  if [ -n "$child" ]; then forward "$child"; fi
}
trap on_sigterm TERM

pause() { sleep 1 & wait "$!"; }

run_script() {  # without a new line, so that the numbers in messages of bash are those of the script
  SHELL_START=$shell_start bash -c "eval \"\$SHELL_START\"; unset SHELL_START; $1" & child=$!
  if [ -n "$noticed" ]; then forward "$child"; fi
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  wait "$child"
  status=$?
  child=''
}

wait_for_keepers() {  # they end with the pod
  local end_s=$((SECONDS + grace_s))
  while keepers_run && [ "$SECONDS" -lt "$end_s" ]; do pause; done
}

link_workdir() {  # task files for SkyPilot use this path
  if [ ~/sky_workdir -ef . ]; then return; fi
  if [ -e ~/sky_workdir ]; then
    echo "holdfast: ~/sky_workdir already exists in the image, and is not $PWD" >&2
    return 1
  fi
  ln -s "$PWD" ~/sky_workdir
}

if ! link_workdir && [ "$needs_link" = yes ]; then exit 1; fi
phase=setup
if [ -n "$setup" ]; then
  run_script "$setup"
  if [ "$status" -ne 0 ]; then echo "holdfast: setup exited with $status" >&2; exit 1; fi
fi
phase=run
while true; do
  end_if_noticed
  run_script "$run"
  wait_for_keepers
  if [ "$status" -eq 0 ]; then exit 0; fi
  end_if_noticed
  case " $free_codes " in *" $status "*)
    echo "holdfast: run exited with $status; it is to be restarted" >&2
    exit "$restart_status" ;;
  esac
  echo "holdfast: run exited with $status" >&2
  if [ "$restarts" -le 0 ]; then break; fi
  restarts=$((restarts - 1))
  for _ in {1..10}; do pause; done
done
# From 128 on, a PyTorchJob would restart the pod.
if [ "$restart_status" -ge 128 ] && [ "$status" -ge 128 ]; then status=1; fi
exit "$status"

"""First process of a pod: runs `setup` and `run` under bash, and forwards Kubernetes' SIGTERM; pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS
from holdfast.jobs.conda import conda_start
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.sky_workdir import SKY_WORKDIR

_SCRIPT = r"""# holdfast: runs SETUP and RUN, and passes the SIGTERM of Kubernetes on as a preemption notice.
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
"""
_CLONE = r"""# holdfast: clones the workdir. A branch takes precedence over a tag of the same name.
export GIT_TERMINAL_PROMPT=0
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'  # root owns the volume
for pause in 5 15 45 -; do
  git -c protocol.ext.allow=never clone --no-checkout -- "$HOLDFAST_WORKDIR_URL" "$1" && break
  if [ "$pause" = - ]; then exit 1; fi
  find "$1" -mindepth 1 -delete
  sleep "$pause"
done
cd "$1" || exit 1
if [ -z "$2" ]; then git checkout --quiet HEAD -- || exit 1
elif git rev-parse --verify --quiet "refs/remotes/origin/$2^{commit}" >/dev/null; then
  git checkout --quiet -B "$2" "origin/$2" -- || exit 1
elif git rev-parse --verify --quiet "$2^{commit}" >/dev/null; then
  git checkout --quiet --detach "$2" -- || exit 1
else
  git fetch --quiet origin -- "$2" && git checkout --quiet --detach FETCH_HEAD -- || exit 1
fi
git submodule update --init --recursive
"""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Exit status for a restart of the pod, and number of restarts without it."""

    status: int = PREEMPTED_STATUS
    in_place: int = 0  # restarts after errors


def pod_command(task: Task, rule: RestartRule, *, grace_s: int) -> list[str]:
    """Return the command of a pod's container, not escaped.

    The shell is the first process of the container. It exits with `rule.status` if `run` fails after a
    notice, or exits with 75, 63 or one of `recover_on_exit_codes`. Keepers of the training have up to
    `grace_s` seconds to complete saves, because they end with the pod.
    """
    free_codes = sorted({PREEMPTED_STATUS, HUNG_STATUS, *task.recovery.free_codes})
    numbers = [str(rule.status), " ".join(map(str, free_codes)), str(rule.in_place), str(grace_s)]
    needs_link = "yes" if SKY_WORKDIR in task.setup + task.run else "no"
    start = conda_start(task.setup, task.run)
    return ["bash", "-c", _SCRIPT, "holdfast", task.setup, task.run, *numbers, start, needs_link]


def clone_command(task: Task, folder: str) -> list[str]:
    """Return the command that clones the task's repository into a folder, not escaped."""
    assert task.repository is not None
    return ["bash", "-c", _CLONE, "holdfast", folder, task.repository.ref or ""]

conda() {  # otherwise `conda activate` would fail, and the commands after it would run
  if holdfast_load_conda; then conda "$@"; return; fi
  if [ "${1:-}" != activate ]; then echo 'bash: conda: command not found' >&2; return 127; fi
  echo "holdfast: \`conda $*\` cannot work, so the job ends here: conda is not installed on $(uname -n)." >&2
  echo 'Install it (https://conda-forge.org/download), or remove the line and launch the job from a' \
    'shell in which the environment is active: a job has the PATH of that shell.' >&2
  exit 127
}

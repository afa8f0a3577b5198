# holdfast: makes `conda activate` work in this shell and in those that it starts
holdfast_load_conda() {
  local program base hook=etc/profile.d/conda.sh flags=$-
  for program in "${CONDA_EXE:-}" "$(type -P conda)" "${HOME:-}"/{miniconda3,miniforge3,anaconda3}/bin/conda \
    /opt/conda/bin/conda; do
    if [ ! -x "$program" ]; then continue; fi
    base=${program%/*/*}
    if [ ! -r "$base/$hook" ]; then base=$("$program" info --base 2>/dev/null) || continue; fi
    if [ ! -r "$base/$hook" ]; then continue; fi
    unset -f conda
    set -a
    . "$base/$hook"
    case $flags in *a*) ;; *) set +a ;; esac
    return 0
  done
  return 1
}

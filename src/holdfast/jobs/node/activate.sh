# Activates this environment in a shell that has left it.
deactivate() { PATH=$_HOLDFAST_PATH; unset VIRTUAL_ENV _HOLDFAST_PATH; unset -f deactivate; hash -r; }
_HOLDFAST_PATH=$PATH
export VIRTUAL_ENV={folder}
export PATH="$VIRTUAL_ENV/bin:$PATH"
hash -r

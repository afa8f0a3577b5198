# holdfast: clones the workdir. A branch takes precedence over a tag of the same name.
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

# Sourced by the scripts beside it, from the repository's root. It finds a Python, makes
# environments, and runs two things at a time; by itself it runs nothing.

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Prints the path of a Python >= 3.12 that can make environments. Every candidate is run: a name
# on PATH can be a shim that fails.
find_python() {
  local pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
  local candidate
  for candidate in python3.12 python3.13 python3 "$pyenv_versions"/*/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
      >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "found no working Python >= 3.12 with venv (tried python3.12, python3.13, python3," \
    "$pyenv_versions/*)"
}

# make_environment FOLDER ARGUMENT...: an environment where `pip install ARGUMENT...` has run.
# Pip runs again only when the arguments or pyproject.toml differ from those of an earlier call.
make_environment() {
  local folder=$1
  shift
  local stamp
  stamp="$folder/installed.$( (cat pyproject.toml && echo "$PWD $*") | cksum | cut -d' ' -f1)"
  if [[ -f $stamp ]] && "$folder/bin/python" -c '' >/dev/null 2>&1; then
    return
  fi
  if ! "$folder/bin/python" -c '' >/dev/null 2>&1; then
    local python
    python=$(find_python)
    echo "making $folder with $python"
    "$python" -m venv --clear "$folder" || die "could not make $folder with $python"
  fi
  echo "installing into $folder: $* (minutes the first time)"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@" \
    || die "pip could not install $* into $folder (its message is above)"
  touch "$stamp"
}

# side_by_side FUNCTION OTHER: runs both at once, for there are two cores. What OTHER prints comes
# when both have ended. Fails with the status of one that failed.
side_by_side() {
  local log beside status=0
  log=$(mktemp)
  "$2" >"$log" 2>&1 &
  beside=$!
  # shellcheck disable=SC2064 # both are local
  trap "kill $beside 2>/dev/null || true; rm -f '$log'" EXIT
  "$1" || status=$?
  wait "$beside" || status=$?
  cat "$log"
  return "$status"
}

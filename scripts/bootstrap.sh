#!/usr/bin/env bash
# Creates .venv from scratch, exactly as the lock file specifies: the same bytes on every machine, or an error.
#
#   scripts/bootstrap.sh [VENV]        (default .venv; PYTHON=... selects the interpreter)
#
# A repeated run only updates the directory. Debian packages are installed only when something is missing and the user
# is root; otherwise a message on stderr lists what to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}

refuse() { printf 'bootstrap: %s\n' "$*" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "$@"; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_debian() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        refuse "$* is missing; as root: apt-get install $*"
    fi
    echo "bootstrap: installing $*" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$@" >&2 ||
        { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "$@" >&2; } ||
        refuse "apt-get could not install $*; install it manually and run this script again"
}

if [ -n "${PYTHON:-}" ]; then
    python=$(find_python "$PYTHON") || refuse "PYTHON=$PYTHON is not a Python 3.11 or newer"
else
    known=(python3 python3.13 python3.12 python3.11)
    python=$(find_python "${known[@]}") || { install_debian python3 python3-venv; python=$(find_python "${known[@]}"); } ||
        refuse "no Python 3.11 or newer was found; set PYTHON=/path/to/python3"
fi

# Debian ships the interpreter without ensurepip; `python3 -m venv` then leaves an incomplete directory behind.
"$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian python3-venv

# The tests compile a stand-in for the driver's library. The demo needs no compiler.
if ! command -v gcc >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        install_debian gcc libc6-dev
    else
        echo "bootstrap: gcc is missing, but make test needs it; as root: apt-get install gcc libc6-dev" >&2
    fi
fi

# Tests of completion run in these shells. Nothing else needs them, so a failed installation is not fatal.
shells=()
for shell in zsh fish; do
    command -v "$shell" >/dev/null || shells+=("$shell")
done
if [ ${#shells[@]} -gt 0 ]; then
    (install_debian "${shells[@]}") || echo "bootstrap: without ${shells[*]} the tests of completion fail" >&2
fi

# A test compiles the kernels for AMD GPUs and compares them with the shipped ones. Nothing else needs the compiler.
if ! command -v clang-19 >/dev/null || ! command -v ld.lld-19 >/dev/null; then
    (install_debian clang-19 lld-19) || echo "bootstrap: without clang-19 and lld-19 a test of AMD's kernels fails" >&2
fi

# A test verifies a release with it, as users do. Nothing else needs it.
command -v openssl >/dev/null || (install_debian openssl) || echo "bootstrap: without openssl a test of releases fails" >&2

# A directory that was copied from elsewhere, or whose interpreter was removed, is created again instead of repaired.
if [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [ -e "$venv/pyvenv.cfg" ] || refuse "$venv exists and is not a virtual environment; move it"
    rm -rf "$venv"
fi
[ -e "$venv" ] || "$python" -m venv "$venv"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Every build backend must be in the lock file: it contains ours, and build isolation would download others.
pip install --quiet --require-hashes --only-binary :all: --requirement requirements/dev.txt
pip install --quiet --no-deps --no-build-isolation --editable .

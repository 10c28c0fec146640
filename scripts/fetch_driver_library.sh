#!/usr/bin/env bash
# Puts NVIDIA's own NVML library below DIR, with the layout of a driver root, so that the error path without a driver is
# tested with the real library. It comes from Debian's non-free archive; nothing is installed into this system.
#
#   scripts/fetch_driver_library.sh DIR
#
# The archive is the one configured for this machine's apt. A repeated run does nothing.
set -euo pipefail

refuse() { printf 'fetch_driver_library: %s\n' "$*" >&2; exit 1; }

[ $# -eq 1 ] || refuse "usage: $0 DIR"
mkdir -p "$1"
root=$(cd "$1" && pwd)

for tool in apt-get dpkg dpkg-deb; do
    command -v "$tool" >/dev/null || refuse "$tool is missing; the library comes from Debian's archive, so this needs Debian"
done
architecture=$(dpkg --print-architecture)
triplet=$(uname -m)-linux-gnu
library=$root/usr/lib/$triplet/libnvidia-ml.so.1
[ -e "$library" ] && exit 0

codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
[ -n "$codename" ] || refuse "/etc/os-release contains no Debian release"

# Both formats of apt's sources. The main archive has the plain code name among its suites; security and updates are
# other archives or other suites, and contain no driver.
find_archive() {
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        awk -v codename="$codename" '
            function flush() { if (uri != "" && (" " suites " ") ~ (" " codename " ")) print uri; uri = suites = "" }
            /^[[:space:]]*$/ { flush(); next }
            tolower($1) == "uris:"   { uri = $2 }
            tolower($1) == "suites:" { $1 = ""; suites = $0 }
            END { flush() }' "$file"
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -r "$file" ] || continue
        sed -nE "s/^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+)[[:space:]]+$codename[[:space:]].*/\2/p" "$file"
    done
}

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || refuse "$keyring is missing; as root: apt-get install debian-archive-keyring"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/download" "$work/unpacked"

quiet_apt() {
    apt-get -q \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o Debug::NoLocking=1 -o APT::Get::List-Cleanup=0 -o Acquire::Languages=none -o Acquire::Retries=2 \
        -o APT::Sandbox::User="$(id -un)" "$@" >>"$work/log" 2>&1
}

fetch_from() {
    printf 'deb [signed-by=%s arch=%s] %s %s non-free\n' "$keyring" "$architecture" "$1" "$codename" >"$work/sources.list"
    quiet_apt update && (cd "$work/download" && quiet_apt download libnvidia-ml1)
}

fetched=
while read -r archive; do
    if fetch_from "$archive"; then fetched=yes; break; fi
done < <(find_archive | sort -u)
if [ -z "$fetched" ]; then
    [ -s "$work/log" ] || refuse "apt on this machine has no archive of Debian $codename; see /etc/apt/sources.list"
    tail -n 3 "$work/log" >&2
    refuse "libnvidia-ml1 could not be downloaded from the archive of Debian $codename that apt on this machine uses"
fi

dpkg-deb --extract "$work"/download/libnvidia-ml1_*.deb "$work/unpacked"
real=$(find "$work/unpacked" -name 'libnvidia-ml.so.*.*' -type f | head -n 1)
[ -n "$real" ] || refuse "libnvidia-ml1 of Debian $codename contains no library"

# Last, and atomically: an existing library is complete.
mkdir -p "$(dirname "$library")"
cp "$real" "$library.$$"
mv "$library.$$" "$library"

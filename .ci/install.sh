#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the missing packages of .ci/packages, or of the given lists in its folder.
#
#     sh .ci/install.sh [LIST...]
#
# It first prints the number of packages, including dependencies, and the megabytes to fetch. Output of apt-get and
# dpkg goes to build/packages.log. If everything is installed, it prints nothing and does not use the network. It uses
# sudo if the user is not root. If there is no sudo either, it prints which packages are missing and what will not
# work without them. The exit code is then 0, because the machine may have the software from elsewhere.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
log=$here/../build/packages.log
[ $# -gt 0 ] || set -- packages
lists=$(cd "$here" && cat "$@")
wanted=$(echo "$lists" | sed 's/#.*//')

# Prints each package with the comment behind it in its list.
say_costs() {
    for package in "$@"; do
        cost=$(echo "$lists" | sed -n "s/^$package  *# *//p")
        echo "  $package: ${cost:-the build stops}"
    done
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "There is no apt-get here, so nothing is installed. What is used, by Debian's names, and what happens without it:"
    # shellcheck disable=SC2086 # a list of words
    say_costs $wanted
    exit 0
fi

missing=
for package in $wanted; do
    case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true) in
    *' installed') ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null || ! sudo -v; then
        echo "Only root may install packages, and there is no sudo for this user. These are missing, unless the machine has them from elsewhere; without them:"
        # shellcheck disable=SC2086
        say_costs $missing
        exit 0
    fi
    as_root=sudo
fi

mkdir -p "$(dirname -- "$log")"
give_up() {
    tail -n 20 "$log" >&2
    echo "$1 failed; all that it printed is in build/packages.log" >&2
    exit 1
}
$as_root apt-get update -qq >"$log" 2>&1 || give_up "apt-get update"
# shellcheck disable=SC2086
n=$(apt-get install -y -s --no-install-recommends $missing 2>>"$log" | grep -c '^Inst ') || true
# shellcheck disable=SC2086
megabytes=$(apt-get install -y -qq --no-install-recommends --print-uris $missing 2>>"$log" |
    awk "/^'/ { bytes += \$3 } END { printf \"%.0f\", bytes / 1e6 }")
echo "installing $n packages, $megabytes MB to fetch:$missing"
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >>"$log" 2>&1 || give_up "apt-get install"

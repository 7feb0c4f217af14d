#!/bin/sh
# Installs those of .ci/packages (or of the list beside it that is named) that are missing, saying which. Uses sudo when not root. Says nothing and asks the
# network nothing when all is there. Called by bench/run.sh, test/run.sh and test/fuzz/run.sh.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
wanted=$(sed 's/#.*//' "$here/${1:-packages}")

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "no apt-get here: going on with what is installed. The build needs what Debian calls" $wanted
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
    if ! command -v sudo >/dev/null; then
        echo "not root and no sudo: please install$missing" >&2
        exit 1
    fi
    as_root=sudo
fi
echo "installing with apt-get:$missing"
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing

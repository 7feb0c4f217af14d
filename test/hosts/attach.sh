#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attach.sh PORT BRIDGE: makes an interface a port of a bridge, and waits until frames pass.
set -eu
ip link set "$1" master "$2" addrgenmode none up
until ip -d link show "$1" | grep -q 'bridge_slave state forwarding'; do
    sleep 0.01
done

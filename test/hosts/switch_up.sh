#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# switch_up.sh NETWORKS COMMAND...: the first thing in the namespaces of a test, between its hosts: a bridge for each network, and in /run what all hosts see
# as /run/hosts. Goes on as the command, an agent.
set -eu
networks=$1
shift
mount -t tmpfs -o mode=755 tmpfs /run
ip link set lo up
network=0
while [ "$network" -lt "$networks" ]; do
    ip link add name "bridge$network" type bridge mcast_snooping 0
    ip link set "bridge$network" addrgenmode none up
    network=$((network + 1))
done
exec "$@"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# host_up.sh NUMBER NETWORKS MACHINE COMMAND...: makes a host of new namespaces, in which it runs. Descriptor 9 is the switch's network namespace. With MACHINE
# "own" its boot is another than the machine's. Goes on as the command, an agent.
set -eu
number=$1 networks=$2 machine=$3
shift 3
here=$(dirname -- "$0")

# Its own /run, /dev/shm and names of hosts; what the switch has in /run, as all hosts do, in /run/hosts.
mount --bind /run /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/hosts /run/tmp /run/sys
mount --move /dev/shm /run/hosts
mount -t tmpfs tmpfs /dev/shm
mount --bind /run/hosts/etc_hosts /etc/hosts
hostname "host$number"

# The interfaces in /sys are those of the network namespace of whoever mounts it.
mount -t sysfs -o ro sysfs /run/sys
if [ -d /sys/fs/cgroup ]; then
    mount --rbind /sys/fs/cgroup /run/sys/fs/cgroup
fi
mount --move /run/sys /sys

if [ "$machine" = own ]; then
    cat /proc/sys/kernel/random/uuid >/run/boot_id
    mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
fi

ip link set lo up
network=0
while [ "$network" -lt "$networks" ]; do
    port=port${number}_$network
    ip link add name "eth$network" type veth peer name "$port" netns /proc/self/fd/9
    ip address add "10.77.$network.$((number + 1))/24" dev "eth$network"
    if [ -e /proc/net/if_inet6 ]; then
        ip address add "fd77:$((network + 1))::$((number + 1))/64" dev "eth$network" nodad
    fi
    ip link set "eth$network" up
    nsenter --net=/proc/self/fd/9 sh "$here/attach.sh" "$port" "bridge$network"
    network=$((network + 1))
done
exec 9<&-
exec "$@"

# SPDX-License-Identifier: Apache-2.0
"""Passes every frame from one interface on to the other, later, except for those that it loses.

    relay.py INNER OUTER SEED

It runs between a host's port and its bridge (hosts.py). A line "DELAY_S LOSS_LEAVING LOSS_COMING" on its
standard input sets the delay, and the probability to lose a frame that leaves the host (came in at INNER) or
comes to it. It answers with a line. Frames do not overtake each other. When its input ends, it passes on what
it holds, prints how many frames passed, were lost, and could not be held, and ends.

Frames are those of the kernel's own segmentation, and their checksums are not computed yet. Their virtio
header says so, and is passed on."""
import collections
import json
import os
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_STATISTICS, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 6, 15, 23, 33
ETH_P_ALL = 3
MAX_BYTES = 64 << 20  # held in one direction


def open_interface(name):
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, SO_RCVBUFFORCE):  # the latter has no limit, but needs privileges
        try:
            link.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
        except PermissionError:
            pass
    link.bind((name, ETH_P_ALL))
    link.setblocking(False)
    return link


class Direction:
    def __init__(self, source, sink, chance):
        self.source, self.sink, self.chance = source, sink, chance
        self.delay = self.loss = 0.0
        self.held, self.bytes = collections.deque(), 0
        self.passed = self.lost = self.overrun = 0

    def take(self, most):
        """Reads available frames, up to a limit, so that the other direction has its turn."""
        for _ in range(most):
            try:
                frame = self.source.recv(1 << 17)
            except OSError:  # nothing more, or the interface is gone with its host
                return
            if self.chance.random() < self.loss:
                self.lost += 1
            elif self.bytes + len(frame) > MAX_BYTES:
                self.overrun += 1
            else:
                self.held.append((time.monotonic() + self.delay, frame))
                self.bytes += len(frame)

    def give(self):
        while self.held and self.held[0][0] <= time.monotonic():
            frame = self.held.popleft()[1]
            self.bytes -= len(frame)
            try:
                self.sink.send(frame)
                self.passed += 1
            except OSError:  # no room there, or the interface is gone: the frame is lost
                self.overrun += 1

    def counts(self):
        unread = int.from_bytes(self.source.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)[4:], sys.byteorder)
        return {'passed': self.passed, 'lost': self.lost, 'overrun': self.overrun + unread}


def take_line(leaving, coming, number):
    """Reads a line of standard input. Returns False at the end of input. The writer waits for the answer, so
    there is at most one line."""
    line = os.read(0, 1 << 10)
    if line:
        delay, leaving.loss, coming.loss = map(float, line.split())
        leaving.delay = coming.delay = delay
        print('told', number, flush=True)
    return bool(line)


def main():
    inner, outer = (open_interface(name) for name in sys.argv[1:3])
    chance = random.Random(int(sys.argv[3]))
    leaving, coming = directions = Direction(inner, outer, chance), Direction(outer, inner, chance)
    ending, n_told = False, 0
    while not ending or any(d.held for d in directions):
        due = [d.held[0][0] for d in directions if d.held]
        wait = max(0, min(due) - time.monotonic()) if due else None
        ready = select.select([inner, outer] + ([] if ending else [0]), [], [], wait)[0]
        told = 0 in ready  # earlier frames are passed on with the earlier settings
        for direction in directions:
            direction.take(1 << 16 if told else 256)
            direction.give()
        if told:
            n_told += 1
            ending = not take_line(leaving, coming, n_told)
    print(json.dumps({'leaving': leaving.counts(), 'coming': coming.counts()}), flush=True)


main()

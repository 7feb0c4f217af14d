# SPDX-License-Identifier: Apache-2.0
"""agent.py SOCKET: process 1 of a host of hosts.py, or of the switch between hosts. It runs commands that
on_host.py sends over SOCKET. It ends when its standard input ends, which is when its starter ends. The kernel
then ends everything in its process namespace."""
import json
import os
import select
import signal
import socket
import subprocess
import sys


def read_whole(connection, n):
    data = b''
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            sys.exit('on_host.py left in the middle of its question')
        data += more
    return data


def answer(connection, **words):
    try:
        connection.sendall(json.dumps(words).encode() + b'\n')
    except OSError:
        pass  # nobody waits for it any more


def signal_group(command, number):
    try:
        os.killpg(command.pid, number)
    except ProcessLookupError:
        pass


def watch(connection, command):
    """Watches a command and its client. If the command ends, the client gets its code. If the client ends, so
    does the command. Signals that the client sends go to the command."""
    ended = os.pidfd_open(command.pid)
    while True:
        ready = select.select([connection, ended], [], [])[0]
        if ended in ready:
            return answer(connection, code=command.wait())
        try:
            signals = connection.recv(16)
        except ConnectionResetError:
            signals = b''
        if not signals:
            signal_group(command, signal.SIGKILL)
            return command.wait()
        for number in signals:
            signal_group(command, number)


def serve(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    question = json.loads(read_whole(connection, int.from_bytes(head, 'little')))
    try:
        command = subprocess.Popen(question['command'], stdin=descriptors[0], stdout=descriptors[1], stderr=descriptors[2],
                                   env=question['env'], cwd=question['cwd'], start_new_session=True)
    except OSError as why:
        return answer(connection, failed=f'{why.filename or question["command"][0]}: {why.strerror}')
    for descriptor in descriptors:
        os.close(descriptor)
    return watch(connection, command)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the host become its children, and need not be waited for
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    print('ready', flush=True)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            return
        connection = listener.accept()[0]
        if os.fork():
            connection.close()
            continue
        try:
            listener.close()
            serve(connection)
        finally:
            sys.stderr.flush()
            os._exit(0)


main()

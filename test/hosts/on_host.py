# SPDX-License-Identifier: Apache-2.0
"""Runs a command on another host of hosts.py, with this process's environment, folder and standard streams.
Its exit code is the command's, 128 + N after signal N, or 255 if the host is gone. Signals to end and user
signals are passed on. If this process is killed, so is the command with its process group.

    on_host.py SOCKET COMMAND...         on the host whose agent listens there
    on_host.py --shell NAME WORDS...     on a host, from another: for launchers that start processes with ssh or rsh.
                                         The words are for the host's shell."""
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def ask(path, command):
    """Returns the agent's answer, or None if the agent is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        question = json.dumps({'command': command, 'env': dict(os.environ), 'cwd': os.getcwd()}).encode()
        # A signal that comes during the request is passed on after it. It would otherwise end this process,
        # though the command may already run.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        for number in PASSED_ON:
            signal.signal(number, lambda n, _: connection.send(bytes([n])))
        socket.send_fds(connection, [len(question).to_bytes(8, 'little')], [0, 1, 2])
        connection.sendall(question)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        line = connection.makefile().readline()
        return json.loads(line) if line else None


def main():
    path, *command = sys.argv[1:]
    if path == '--shell':
        name, *words = command
        path, command = f'/run/hosts/{name}', ['sh', '-c', ' '.join(words)]
    try:
        answer = ask(path, command)
    except (ConnectionError, FileNotFoundError):
        answer = None
    if answer is None:
        print(f'{os.path.basename(path)}: the host is gone', file=sys.stderr)
        return 255
    if 'failed' in answer:
        print(answer['failed'], file=sys.stderr)
        return 127
    return answer['code'] if answer['code'] >= 0 else 128 - answer['code']


sys.exit(main())

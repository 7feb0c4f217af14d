# SPDX-License-Identifier: Apache-2.0
"""Runs a command on another host of hosts.py, with this process's environment, folder and standard streams, and ends with the command's exit code, 128 + N
after signal N, 255 where the host is gone. Signals that ask to end, and those for users, are passed on; where this process is killed, the command is, with its
process group.

    on_host.py SOCKET COMMAND...         on the host whose agent listens there
    on_host.py --shell NAME WORDS...     on a host, from another: the words are for its shell, as ssh's and rsh's are. For launchers that start something on
                                         every host by such a program"""
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def ask(path, command):
    """The agent's answer; None where it has gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        question = json.dumps({'command': command, 'env': dict(os.environ), 'cwd': os.getcwd()}).encode()
        # A signal that comes while this is asked is passed on behind the question: else it would end this process, though the command may run already.
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

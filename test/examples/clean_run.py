# SPDX-License-Identifier: Apache-2.0
"""Runs a command without the variables of an outer job, and without ZERO_*."""
import os
import subprocess

OUTER = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')


def run(command, cwd=None, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in OUTER}
    return subprocess.run(command, capture_output=True, text=True, env={**env, **variables}, cwd=cwd, check=False)

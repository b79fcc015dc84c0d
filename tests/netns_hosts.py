"""Hosts on this machine, made of namespaces: each with its own address, processes, /tmp and home, reached by SSH.

They hang on one bridge that itself lies in a namespace (the ``outside``), so that this machine's own network sees no
packet of theirs. Needs root, iproute2 and an SSH server.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NETWORK = "10.77.0."
SSHD = "/usr/sbin/sshd"

# Process 1 of a host. What lies under /tmp or the home and is needed stays visible through bind mounts.
INIT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run; mkdir -p /run/sshd /run/keep
i=0; for path in $KEEP; do mkdir -p /run/keep/$i; mount --rbind $path /run/keep/$i; i=$((i+1)); done
mount -t tmpfs -o size=2g tmpfs /tmp; chmod 1777 /tmp
mount -t tmpfs -o size=1g tmpfs $HOME; chmod 700 $HOME
mount -t tmpfs -o size=2g tmpfs /dev/shm; chmod 1777 /dev/shm
i=0; for path in $KEEP; do mkdir -p $path; mount --rbind /run/keep/$i $path; i=$((i+1)); done
hostname $NAME
mkdir -m 700 $HOME/.ssh
cp $KEYS/key.pub $HOME/.ssh/authorized_keys
cp $KEYS/key $HOME/.ssh/key; chmod 600 $HOME/.ssh/*
cd $HOME
touch /run/ready
if [ "$SERVE" ]; then
    ssh-keygen -q -t ed25519 -N '' -f /run/host_key
    $SSHD -D -e -f /dev/null -h /run/host_key -o UsePAM=no -o StrictModes=no -o PasswordAuthentication=no \
        -o PermitRootLogin=yes -o MaxStartups=100 -o Subsystem='sftp internal-sftp' 2> /run/sshd.log &
fi
while :; do sleep 3600 & wait -n || :; done
"""


def why_not() -> str:
    """Why such hosts cannot be had here; "" where they can."""
    if os.name != "posix" or sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for namespaces"
    for command in ("ip", "unshare", "nsenter", "ssh", "rsync", SSHD):
        if not shutil.which(command):
            return f"needs {command}"
    made = subprocess.run(["unshare", "-n", "-m", "-p", "-u", "-f", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "namespaces cannot be made here"


class Host:
    """A host, from its first process to its last."""

    def __init__(self, hosts: Hosts, number: int, *, serve: bool) -> None:
        self.name, self.address = f"{hosts.tag}{number}", f"{NETWORK}{10 + number if serve else 1}"
        _ip("netns", "add", self.name)
        hosts.made.append(self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        environment = {
            **os.environ, "KEEP": " ".join(map(shlex.quote, hosts.keep)), "NAME": self.name, "KEYS": str(hosts.keys),
            "SERVE": "yes" if serve else "", "SSHD": SSHD,
        }  # fmt: skip
        command = ["unshare", "-m", "-p", "-u", "-i", "-f", "--mount-proc", "--kill-child", "bash", "-c", INIT]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=open(hosts.keys / f"{self.name}.log", "wb"),  # noqa: SIM115
        )  # fmt: skip

    def link(self, to: Host, number: int) -> None:
        """A cable from this host to the bridge of the outside."""
        _ip("-n", to.name, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("-n", to.name, "link", "set", f"p{number}", "master", "br0", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.cable(up=True)

    def cable(self, *, up: bool) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up" if up else "down")
        if up:  # Ray finds its own address by asking for a way to the world; nothing is sent
            _ip("-n", self.name, "route", "replace", "default", "via", f"{NETWORK}1")

    @property
    def init(self) -> int:
        """The host's process 1, by its number on this machine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, command: str, *, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """A shell command on the host."""
        enter = ["nsenter", "-t", str(self.init), "-m", "-p", "-n", "-u", "-i"]
        done = subprocess.Popen(
            [*enter, "bash", "-c", f"cd ~; {command}"], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            out, _ = done.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            done.kill()
            raise
        return subprocess.CompletedProcess(command, done.returncode, out, "")

    def processes(self) -> list[str]:
        """Command lines of what runs on the host beside its own first processes and SSH server."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        found = []
        for pid in pids.split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            own = line.startswith(("sleep 3600", "bash -c \nset -e", "unshare -m", f"sshd: {SSHD}", f"{SSHD} -D"))
            if line and not own:
                found.append(line)
        return found


class Hosts:
    """``count`` hosts with an SSH server each, and the ``outside`` without one, from where they are administered."""

    def __init__(self, count: int, folder: Path) -> None:
        self.tag, self.made = f"td{os.getpid() % 100000}-", []  # type: str, list[str]
        self.keys = folder / "keys"
        self.keys.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.keys / "key"], check=True)
        masked = ("/tmp/", str(Path.home()) + "/", "/run/")
        wanted = [sys.prefix, sys.base_prefix, str(ROOT), str(self.keys)]
        self.keep = [path for path in dict.fromkeys(wanted) if (path + "/").startswith(masked)]
        try:
            self.outside = Host(self, 0, serve=False)
            self._await_mounts(self.outside)
            _ip("-n", self.outside.name, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.outside.name, "addr", "add", f"{NETWORK}1/24", "dev", "br0")
            _ip("-n", self.outside.name, "link", "set", "br0", "up")
            self.hosts = [Host(self, number, serve=True) for number in range(1, count + 1)]
            for number, host in enumerate(self.hosts, start=1):
                host.link(self.outside, number)
            for host in self.hosts:
                self._await_ssh(host)
        except BaseException:
            self.close()
            raise

    def _await_mounts(self, host: Host) -> None:
        """Before its home and its Python are in place nothing can run there."""
        end = time.monotonic() + 20
        while not Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split() or (
            host.run("test -e /run/ready").returncode
        ):
            assert time.monotonic() < end, (self.keys / f"{host.name}.log").read_text()
            time.sleep(0.1)

    def _await_ssh(self, host: Host) -> None:
        end = time.monotonic() + 20
        while True:
            done = self.outside.run(f"ssh {SSH_OPTIONS} {host.address} hostname")
            if done.stdout.strip().endswith(host.name):
                return
            assert time.monotonic() < end, done.stdout + (self.keys / f"{host.name}.log").read_text()
            time.sleep(0.5)

    def close(self) -> None:
        """End every process of every host, by its id, and take the namespaces away."""
        for name in self.made:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for host in (getattr(self, "outside", None), *getattr(self, "hosts", ())):
            if host:
                host.process.wait(20)
        for name in self.made:
            _ip("netns", "delete", name)


SSH_OPTIONS = "-i ~/.ssh/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

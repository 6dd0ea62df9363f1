"""`Pods`: pods as processes on this machine, each with the command line, the variables and the mounts of its manifest."""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.docker.manifests import ROOT, Pod, volume_files
from tests.training.scheduled import without_schedulers

Objects = dict[str, dict[str, bytes]]  # content by key, by name


class Pods:
    """Runs the commands of their containers.

    objects  Secrets and ConfigMaps, as `kubectl create` makes them
    address  of the rendezvous, once it is there
    """

    def __init__(self, folder: Path) -> None:
        self.objects: Objects = {}
        self.address = ""
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        for name, command in (("shardnet", ["-m", "shardnet.cli"]), ("healthcheck", [str(ROOT / "docker" / "healthcheck")])):
            path = self._bin / name
            path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *command])} "$@"\n')
            path.chmod(0o755)

    @asynccontextmanager
    async def container(self, host: str, pod: Pod, name: str, command: Sequence[str] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
        """A container of a pod with this host name, or another command inside it; killed at the end."""
        spec = pod.container(name)
        places = {path: str(self._mount(host, pod, *mount)) for path, *mount in pod.mounts(spec)}
        environment = {name: self._here(value, places) for name, value in pod.environment(spec).items()}
        words = [self._here(word, places) for word in command or pod.arguments(spec)]
        process = await asyncio.create_subprocess_exec(
            *(str(self._bin / words[0]) if (self._bin / words[0]).exists() else words[0], *words[1:]),
            # each pod's host has its own name, which tells nodes apart
            env=without_schedulers(os.environ) | environment | {"SHARDNET_NODE": host, "PATH": self._path, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def run(self, host: str, pod: Pod, name: str, command: Sequence[str] = ()) -> str:
        """Run a container to its end, which must be good; return its output."""
        async with self.container(host, pod, name, command) as process:
            output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        return output

    @property
    def _path(self) -> str:
        return f"{self._bin}:{os.environ['PATH']}"

    def _mount(self, host: str, pod: Pod, volume: str, within: str) -> Path:
        folder = self._folder / host / volume
        for path, content in volume_files(pod, volume, self.objects).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        (folder / within).mkdir(parents=True, exist_ok=True)
        return folder / within

    def _here(self, text: str, places: dict[str, str]) -> str:
        """With paths of mounts, and the addresses of the rendezvous, as they are on this machine."""
        text = re.sub(rf"^({'|'.join(places)})(?=/|$)", lambda match: places[match[0]], text)
        if text == "0.0.0.0:7000":
            return "127.0.0.1:0"
        return text.replace("shardnet-rendezvous:7000", self.address).replace("127.0.0.1:7000", self.address)

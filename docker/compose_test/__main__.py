"""Build the image, run the cluster of compose.yaml, and check that it does what docs/compose.md says. Only the image is left afterwards.

If no container engine is up, or no base image can be had, this says so, checks the syntax of compose.yaml and ends with status 0.

Environment variables:
BASE_IMAGE, TORCH_INDEX, IMAGE   as in compose.yaml. Without BASE_IMAGE: python:3.11-slim if the engine has it or can pull it, otherwise
                                 an image made here by docker/make-base-image (one that was made earlier is used without a pull)
BUILD_NETWORK                    network of the build (default: host, since the engine's default network may not reach a package index)
"""

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from compose_test import image
from compose_test.cluster import Cluster
from compose_test.console import Failure, headline, say
from compose_test.engine import compose, is_up, run
from compose_test.scenarios import FAULTS, faults, plain

PLAIN = "plain"
SCENARIOS = [PLAIN, *FAULTS]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _test(options.scenario or SCENARIOS)
    except Failure as failure:
        headline(f"FAILED: {failure}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make compose-test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", type=_scenario, metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; default: all")
    return parser.parse_args()


def _scenario(name: str) -> str:
    if name not in SCENARIOS:
        raise argparse.ArgumentTypeError(f"there is no {name!r}; there are {', '.join(SCENARIOS)}")
    return name


def _stop(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _test(scenarios: list[str]) -> int:
    headline("compose.yaml: syntax")
    if not compose():
        say("NOT RUN: neither docker-compose nor the plugin of `docker compose` is installed; nothing was checked")
        return 0
    environment = os.environ | {
        "IMAGE": os.environ.get("IMAGE", "shardnet:local"),
        "BUILD_NETWORK": os.environ.get("BUILD_NETWORK", "host"),
    }
    for more in ((), ("--profile", "gpu")):
        run(*compose(), *more, "config", "--quiet", environment=environment)
    say(f"`{' '.join(compose())}` takes it, with and without the profile gpu")
    if not is_up():
        say("NOT RUN: no container engine is up; nothing but the syntax was checked")
        return 0
    base = image.base_image()
    if base is None:
        say("NOT RUN: no image registry can be reached, and docker/make-base-image wants root and debootstrap; only the syntax was checked")
        return 0
    image.build(environment | {"BASE_IMAGE": base})
    _run(scenarios, environment["IMAGE"])
    headline("all is well")
    return 0


def _run(scenarios: list[str], image_name: str) -> None:
    if PLAIN in scenarios:
        with Cluster(image_name) as cluster:
            plain(cluster)
    wanted = [each for each in FAULTS if each in scenarios]
    if wanted:
        with Cluster(image_name) as cluster:
            faults(cluster, wanted)


if __name__ == "__main__":
    sys.exit(main())

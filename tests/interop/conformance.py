"""Run torch's own tests of a process group on the backend "shardnet": `python tests/interop/conformance.py [NAME ...]`.

The tests are those of `torch.testing._internal.distributed.distributed_test`, which torch ships, and those that `harnesses.py` builds
from the harnesses that torch ships for its other tests. A test that depends on the backend's name is told "gloo", which carries CPU
tensors as shardnet does; the groups that it makes are shardnet's. Two processes run all tests, and make a new world for each. Each test
prints one line on stdout; the exit status is 1 if a test failed.
"""

import argparse
import datetime
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

WORLD_SIZE = 2
TIMEOUT_S = 60  # of the collectives of a world
_GPU = "needs GPUs, though it does not say so where the backend is gloo"
_MONITORED = "torch lets only its own groups have one; each barrier of shardnet says who is missing"
_WORDS = "expects the words of gloo's error"
LEFT_OUT = {
    "test_all_to_all_cuda": _GPU,
    "test_all_to_all_cuda_complex": _GPU,
    "test_all_to_all_full_group_cuda": _GPU,
    "test_batch_isend_irecv_mixed_backend_err": _GPU,
    "test_batch_isend_irecv_nccl": _GPU,
    "test_batch_isend_irecv_op_err": _GPU,
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_global": _WORDS,
    "test_barrier_timeout_group": _WORDS,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_get_backend": "expects the name gloo",
    "test_new_subgroups_with_group_param": "needs four ranks, though it does not say so",
    "test_SyncBatchNorm_process_group": "needs torchvision",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only tests whose name contains one of these")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return run_rank(options.rank, options.names)
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_in(folder)
        command = [sys.executable, __file__, *options.names, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env={**os.environ, **environment, "RANK": str(rank)}) for rank in range(WORLD_SIZE)
        ]
        return max(rank.wait() for rank in ranks)


def environment_in(folder: str) -> dict[str, str]:
    return {"TEMP_DIR": folder, "BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def run_rank(rank: int, names: list[str]) -> int:
    faulthandler.enable()
    suite, results = load(), Counter[str]()
    for number, name in enumerate(suite.names()):
        if names and not any(each in name for each in names):
            continue
        began_s = time.monotonic()
        outcome, why = suite.run(name, rank, number)
        results[outcome] += 1
        if rank == 0 or outcome == "FAILED":
            print(f"[{rank}] {outcome:8} {name} {time.monotonic() - began_s:.1f} s {why}".rstrip(), flush=True)
    print(f"[{rank}] {', '.join(f'{count} {outcome}' for outcome, count in sorted(results.items()))}", flush=True)
    return 1 if results["FAILED"] else 0


def load() -> "Suite":
    import torch
    import torch.distributed as dist

    def as_shardnet(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            given = ["shardnet" if each == "gloo" else each for each in arguments]
            return make(*given, **{key: "shardnet" if each == "gloo" else each for key, each in options.items()})

        return made

    for name in ("init_process_group", "new_group"):
        made = as_shardnet(getattr(dist, name))
        setattr(dist, name, made)
        setattr(dist.distributed_c10d, name, made)
    torch.manual_seed(0)  # importing the tests makes their models, which must be the same on all ranks
    from torch.testing._internal.distributed import distributed_test

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.interop.harnesses import Harnesses

    return Suite(distributed_test, Harnesses)


class Suite:
    """torch's tests; lives as long as its process."""

    def __init__(self, module: ModuleType, others: type[Any]) -> None:
        self._module = module
        self._folder = Path(os.environ["TEMP_DIR"])
        cases: list[type[Any]] = [type("Case", (module.TestDistBackend, module.DistributedTest._DistTestBase), {}), others]
        self._cases = {name: case for case in cases for name in unittest.TestLoader().getTestCaseNames(case)}
        self._skips = {skip.exit_code: skip.message for skip in module.TEST_SKIPS.values()}

    def names(self) -> list[str]:
        return list(self._cases)

    def run(self, name: str, rank: int, number: int) -> tuple[str, str]:
        """The outcome of the test, and the reason for it."""
        import torch.distributed as dist

        if name in LEFT_OUT:
            return "left out", LEFT_OUT[name]
        case = self._cases[name]
        test = case(name)
        test.rank = rank
        os.environ["TEMP_DIR"] = str(self._make_folder(number))
        test.file_name = f"{os.environ['TEMP_DIR']}/store"
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{test.file_name}",
                world_size=WORLD_SIZE,
                rank=rank,
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
            )
            self._module.Barrier.barrier_id = 0
            getattr(case, name)(test)  # the method of the class: that of the instance would start processes
        except unittest.SkipTest as skipped:
            return "skipped", str(skipped)
        except SystemExit as left:
            return "skipped", self._skips.get(left.code, f"status {left.code}")
        except Exception as error:  # noqa: BLE001 - it is reported
            traceback.print_exc()
            return "FAILED", f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return "passed", ""

    def _make_folder(self, number: int) -> Path:
        """The folder in which the ranks of one world meet; each rank makes it if it is missing."""
        folder = self._folder / str(number)
        for name in ("barrier", "test_dir", "init_dir"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return folder


if __name__ == "__main__":
    sys.exit(main())

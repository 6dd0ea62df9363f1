"""The course with torchft: each rank is a replica group, DDP over its gloo. Timeouts are those of its own example train_ddp.py."""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers.course import LEAST, MEETING, RANK, loss_and_gradients, new_batch, new_model, new_optimizer, serve


def main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of this replica group
    model, batch = new_model(), new_batch()
    inner = new_optimizer(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=LEAST,
        timeout=timedelta(seconds=30),
        init_sync=False,  # all begin with the same parameters; otherwise only one would take part in the first step
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=MEETING,
        replica_id=f"replica_{RANK}",
        hostname="127.0.0.1",
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)

    def step() -> tuple[float, int] | None:
        before = manager.current_step()
        optimizer.zero_grad()
        loss = loss_and_gradients(replicated, batch)
        optimizer.step()
        return (loss, manager.num_participants()) if manager.current_step() > before else None

    serve(step)
    manager.shutdown(wait=False)


main()

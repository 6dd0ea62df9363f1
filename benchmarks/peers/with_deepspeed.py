"""The course with DeepSpeed's ZeRO, of the stage that the first argument gives, in single precision over gloo."""

import sys

import deepspeed

from benchmarks.peers.course import RANKS, SEQUENCES, loss_of, new_batch, new_model, new_optimizer, serve

CONFIG = {
    "train_micro_batch_size_per_gpu": SEQUENCES,
    "train_batch_size": SEQUENCES * RANKS,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "gradient_clipping": 0.0,  # the default is 1.0
    "zero_allow_untested_optimizer": True,  # all contestants use this optimizer, not DeepSpeed's own
}


def main() -> None:
    deepspeed.init_distributed("gloo")
    model, batch = new_model(), new_batch()
    engine, *_ = deepspeed.initialize(model=model, optimizer=new_optimizer(model.parameters()), config=CONFIG)

    def step() -> tuple[float, int]:
        loss = loss_of(engine(batch[:, :-1]), batch)
        engine.backward(loss)
        engine.step()
        return loss.item(), RANKS

    serve(step)


main()

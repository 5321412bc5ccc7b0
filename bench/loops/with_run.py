"""The loop with `shardkeep.Run`."""

from typing import Any

from loops.training import Batches, new_state, train_step


def train(path: str, steps: int) -> Any:
    data = Batches()
    # begin
    import shardkeep

    with shardkeep.Run(path, save_every=10, keep=shardkeep.Keep(last=3, every=20)) as run:
        state, step = run.resume(new_state, iterators={"train": data})
        while step < steps and not run.stopping:
            state, loss = train_step(state, next(data))
            step += 1
            run.step(step, state, metrics={"loss": loss}, iterators={"train": data})
        run.save(step, state, iterators={"train": data})
    # end
    return state

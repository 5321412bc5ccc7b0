"""The loop with Orbax's `CheckpointManager`."""

from typing import Any

import jax

from loops.training import Batches, new_state, train_step


def train(path: str, steps: int) -> Any:
    data = Batches()
    # begin
    import signal

    import orbax.checkpoint as ocp

    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    def everything(state: Any) -> Any:
        return ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data.get_state()))

    before = signal.signal(signal.SIGTERM, stop)
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=3, keep_period=20)
    with ocp.CheckpointManager(path, options=options) as manager:
        step = manager.latest_step()
        if step is None:
            state, step = new_state(), 0
        else:
            wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, new_state())
            args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), data=ocp.args.JsonRestore())
            restored = manager.restore(step, args=args)
            state = restored["state"]
            data.set_state(restored["data"])
        while step < steps and not stopping:
            state, loss = train_step(state, next(data))
            step += 1
            if manager.should_save(step):
                manager.save(step, args=everything(state), metrics={"loss": float(loss)})
        if manager.latest_step() != step:
            manager.save(step, args=everything(state), force=True)
        manager.wait_until_finished()
    signal.signal(signal.SIGTERM, before)
    # end
    return state
